// A button on each block of code copies it: of a block with prompts, the commands alone. A block whose long lines are all
// commands wraps them.
"use strict";

const LONG = 72; // letters of a line that fits
const COMMAND = /^\s*(\$ |#|\.\/|\.venv\/|[A-Z_]+=\S* |-|(python|pip|vllm|lm_eval|sbatch|srun|torchrun|mpirun|kubectl|docker) )/;

const copied = async (text) => {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // a page of plain http
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
};

for (const block of document.querySelectorAll(".highlight pre")) {
  const long = block.textContent.split("\n").filter((line) => line.length > LONG);
  block.classList.toggle("commands", long.every((line) => COMMAND.test(line)));
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const lines = block.textContent.trimEnd().split("\n");
    const commands = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
    await copied(`${(commands.length ? commands : lines).join("\n")}\n`);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  block.parentElement.append(button);
}

// Sphinx puts this file into its search. conf.py defines TEXTS before it: page -> [its text, the messages of its tables].
// The index finds pages by single words. Here, a page with the query as a phrase comes before one with its words alone, and the
// page that explains a message comes first.
const plain = (text) => ` ${text.toLowerCase().replace(/[^\p{L}\p{N}_]+/gu, " ").trim()} `;
const asked = plain(new URLSearchParams(location.search).get("q") ?? "");
const several = asked.trim().includes(" ");
var Scorer = {
  score: ([page, , , , score]) => {
    const [text, messages] = TEXTS[page] ?? ["", []];
    const phrase = several ? Math.min(4, text.split(asked).length - 1) : 0;
    const words = new Set(asked.trim().split(" "));
    const isMessage = (message) => message.includes(asked)
      || (message.trim().split(" ").length > 3 && message.trim().split(" ").every((word) => words.has(word)));
    return score + 10 * phrase + (several && messages.some(isMessage) ? 200 : 0) - (page.startsWith("evidence/") ? 3 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

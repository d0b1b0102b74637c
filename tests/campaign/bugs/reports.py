"""Bugs of what a run writes and shows: metrics, receipts, the goodput ledger, the GPU monitor, reports, pages and traces."""

from bugs import Bug

METRICS, THROUGHPUT, SAMPLES = "jaxtrain/metrics.py", "jaxtrain/throughput.py", "jaxtrain/samples.py"
LEDGER, GOODPUT = "jaxtrain/ledger.py", "jaxtrain/goodput.py"
MONITOR, ALERTS, CARD = "jaxtrain/monitor/__init__.py", "jaxtrain/monitor/alerts.py", "jaxtrain/monitor/card.py"
RECEIPT, FIGURES, GOLDEN = "jaxtrain/receipt/__init__.py", "jaxtrain/receipt/figures.py", "jaxtrain/receipt/golden.py"
THINGS, CODE, LINEAGE = "jaxtrain/receipt/things.py", "jaxtrain/receipt/code.py", "jaxtrain/receipt/lineage.py"
RUN, CHARTS, COMPARE = "jaxtrain/report/run.py", "jaxtrain/report/charts.py", "jaxtrain/report/compare.py"
LINES, MEASURE, TRACER = "jaxtrain/page/lines.py", "jaxtrain/profile/measure.py", "jaxtrain/profiling.py"
UNIT = {name: f"unit/test_{name}.py" for name in ("metrics", "goodput", "monitor", "receipt", "report", "profile")}
OF_A_RUN = "proofs/test_receipt_of_a_run.py"

BUGS = (
    # Metrics, rates, samples
    Bug("metrics: a rewind drops the restored step", METRICS, '["step"] <= step:', '["step"] < step:', UNIT["metrics"]),
    Bug("metrics: a rewind keeps later samples", METRICS, "if sample.step <= step]", "]", "proofs/test_watching.py -k drops"),
    Bug("metrics: infinities read back as NaN", METRICS, "name: repr(value) for", 'name: "nan" for', UNIT["metrics"]),
    Bug(
        "metrics: GPUs of two processes share a tag",
        METRICS,
        "{line['process']}.{line['gpu']}",
        "{line['gpu']}",
        UNIT["metrics"],
    ),
    Bug(
        "metrics: a cut line is glued to the next",
        METRICS,
        "path.exists() and any(line is None",
        "False and any(line is None",
        UNIT["metrics"],
    ),
    Bug("throughput: the step after a halt counts", THROUGHPUT, "SETTLE = 2", "SETTLE = 1", UNIT["metrics"]),
    Bug(
        "throughput: the wait of one step stays for the next",
        THROUGHPUT,
        "self._started, self._wait = now, 0.0",
        "self._started = now",
        UNIT["metrics"],
    ),
    Bug("throughput: rates are per device twice", THROUGHPUT, "per_device * self._num_devices", "per_device", UNIT["metrics"]),
    Bug("throughput: memory of the emptiest device", THROUGHPUT, "return max((s[name]", "return min((s[name]", UNIT["metrics"]),
    Bug(
        "samples: a heading inside a text splits it",
        SAMPLES,
        "HEADING.sub(lambda m: ' ' + m[0], s.text + chr(10))",
        "s.text + chr(10)",
        UNIT["metrics"],
    ),
    Bug(
        "tensorboard: events lost in a kill stay lost",
        "jaxtrain/trackers/tensorboard.py",
        "self._add(line, wall)",
        "pass",
        UNIT["metrics"],
    ),
    Bug(
        "wandb: the second attempt is told as the first",
        "jaxtrain/trackers/wandb.py",
        'known["attempt"] + 1 if known',
        'known["attempt"] if known',
        "proofs/test_watching.py -k wandb",
    ),
    Bug("console: time left counts from step 0", "jaxtrain/progress.py", "/ (done - before)", "/ done", UNIT["metrics"]),
    # The ledger of wall time
    Bug(
        "ledger: a block's time stays with what is around it",
        LEDGER,
        "                self._account()\n                self._stack.pop()",
        "                self._stack.pop()\n                self._account()",
        UNIT["goodput"],
    ),
    Bug(
        "ledger: lines lose what they could not write",
        LEDGER,
        "if seconds and self._append(line):",
        "if self._append(line) or True:",
        UNIT["goodput"],
    ),
    Bug(
        "ledger: beats write no line",
        LEDGER,
        "self._since - self._line >= LINE_S",
        "self._since - self._line < 0",
        UNIT["goodput"],
    ),
    Bug("goodput: steps that a kill lost count as good", GOODPUT, "_repeat(spans, at)", "pass", UNIT["goodput"]),
    Bug(
        "goodput: the share of a divided line is swapped",
        GOODPUT,
        "(span.last - step) / (span.last - span.first)",
        "(step - span.first) / (span.last - span.first)",
        UNIT["goodput"],
    ),
    Bug(
        "goodput: time that was wanted to stop counts as lost",
        GOODPUT,
        'self.wall_s - self.parts["stopped"]',
        "self.wall_s",
        UNIT["goodput"],
    ),
    Bug("goodput: Ctrl-C is a crash", GOODPUT, "WANTED = (0, 130)", "WANTED = (0,)", UNIT["goodput"]),
    Bug(
        "goodput: a hang counts as steps",
        GOODPUT,
        'if line["exit_code"] == HUNG:',
        'if line["exit_code"] == -HUNG:',
        UNIT["goodput"],
    ),
    # The monitor of GPUs
    Bug(
        "monitor: the lowest temperature",
        MONITOR,
        "max(temperatures, default=None)",
        "min(temperatures, default=None)",
        UNIT["monitor"],
    ),
    Bug(
        "monitor: NVLink's rate counts from the start",
        MONITOR,
        "self._counters[place] = (ended, now)",
        "self._counters.setdefault(place, (began, before))",
        UNIT["monitor"],
    ),
    Bug("monitor: a GPU that is lost is asked again", MONITOR, "self._gone[place] = str(error)", "pass", UNIT["monitor"]),
    Bug(
        "monitor: a driver that hangs is not told",
        MONITOR,
        "asked and silent > SILENT_S",
        "asked and silent < 0",
        UNIT["monitor"],
    ),
    Bug(
        "card: power in milliwatts",
        CARD,
        "self._ask(nvml.nvmlDeviceGetPowerUsage, lambda mw: mw / 1e3)",
        "self._ask(nvml.nvmlDeviceGetPowerUsage, float)",
        UNIT["monitor"],
    ),
    Bug(
        "card: sent and received swapped",
        CARD,
        "return int(sent), int(received)",
        "return int(received), int(sent)",
        UNIT["monitor"],
    ),
    Bug(
        "alerts: throttling is over at the first clean line",
        ALERTS,
        "self._clean[gpu] >= CLEAN",
        "self._clean[gpu] >= 1",
        UNIT["monitor"],
    ),
    Bug(
        "alerts: memory errors of before are new",
        ALERTS,
        "self._ecc.setdefault(gpu, errors)",
        "self._ecc.setdefault(gpu, 0)",
        UNIT["monitor"],
    ),
    Bug(
        "alerts: MFU's ratio upside down",
        ALERTS,
        "reached = self._longest / middle",
        "reached = middle / self._longest",
        UNIT["monitor"],
    ),
    # Receipts
    Bug(
        "receipt: figures of earlier attempts too", FIGURES, 'if line["step"] > since]', 'if line["step"] > 0]', UNIT["receipt"]
    ),
    Bug(
        "receipt: the slowest steps are left out of the speed",
        FIGURES,
        "window = timed[left_out:]",
        "window = timed[: len(timed) - left_out]",
        UNIT["receipt"],
    ),
    Bug(
        "receipt: measured over planned upside down",
        FIGURES,
        "return measured / planned if",
        "return planned / measured if",
        UNIT["receipt"],
    ),
    Bug("receipt: the last loss is left out", FIGURES, "+ [last] * bool(losses)", "", UNIT["receipt"]),
    Bug(
        "receipt: an attempt's first state is overwritten",
        RECEIPT,
        'if "loaded" not in self.fields:',
        "if True:",
        UNIT["receipt"],
    ),
    Bug(
        "receipt: an earlier attempt loses what it shares",
        "jaxtrain/receipt/stored.py",
        'for name in full.pop("same_as_next", ()):',
        'for name in full.pop("same_as_next", ())[:-1]:',
        UNIT["receipt"],
    ),
    Bug("lineage: an attempt that saved nothing counts", LINEAGE, 'attempts[i].get("id") == by]', "by]", UNIT["receipt"]),
    Bug("diff: a throttled GPU explains nothing", THINGS, 'gpu["share"] >= THROTTLED', 'gpu["share"] < 0', OF_A_RUN),
    Bug("diff: preflight's fastest node", THINGS, "out[name] = min(", "out[name] = max(", OF_A_RUN),
    Bug("diff: the order of a mixture's files is no difference", THINGS, "order_a != order_b:", "False:", OF_A_RUN),
    Bug(
        "golden: a faster run is worse",
        GOLDEN,
        "has <= had * (1 + percent / 100)",
        "has >= had * (1 + percent / 100)",
        OF_A_RUN,
    ),
    Bug(
        "golden: NaN passes for any loss",
        GOLDEN,
        'return apart if apart == apart else float("inf")',
        "return apart if apart == apart else 0.0",
        OF_A_RUN,
    ),
    Bug("golden: half a run proves something", GOLDEN, "and not unproved(verdicts)", "", OF_A_RUN),
    Bug(
        "golden: another computation is compared all the same",
        GOLDEN,
        "if blocked or not steps:",
        "if not steps:",
        OF_A_RUN,
    ),
    # Reports and pages
    Bug("report: a run that hangs is alive", RUN, "self.silent_s < QUIET_S", "self.silent_s > -QUIET_S", UNIT["report"]),
    Bug("report: warnings lose their other lines", RUN, "elif inside:", "elif False:", UNIT["report"]),
    Bug(
        "report: losses are smoothed one line late",
        CHARTS,
        "max(0, i - reach), min(len(kept), i + reach + 1)",
        "max(0, i - reach - 1), min(len(kept), i + reach)",
        UNIT["report"],
    ),
    Bug("report: the worst is starred", COMPARE, "reverse=most)", "reverse=not most)", UNIT["report"]),
    Bug(
        "report: held-out losses of different steps are compared",
        COMPARE,
        "losses.get(max(common))",
        "losses.get(max(losses))",
        UNIT["report"],
    ),
    Bug(
        "timeline: a stretch begins one too late",
        CHARTS,
        "min(last, i + 1) - max(first, i)",
        "min(last, i + 1) - max(first, i + 0.5)",
        UNIT["report"],
    ),
    Bug(
        "lines: the axes are reversed",
        LINES,
        "return (value - self.low) / (self.high - self.low) if",
        "return 1 - (value - self.low) / (self.high - self.low) if",
        UNIT["report"],
    ),
    Bug(
        "lines: thinning loses the lowest points",
        LINES,
        '(("low", 1), ("high", -1))',
        '(("low", -1), ("high", -1))',
        UNIT["report"],
    ),
    Bug("page: a name can write the page", "jaxtrain/page/charts.py", '.replace("<", "\\\\u003c")', "", UNIT["report"]),
    Bug(
        "plan's report: rows of one cause are not added",
        "jaxtrain/plan/report/sections.py",
        "f: sum(getattr(c, f) for c in g) for f in summed",
        "f: max(getattr(c, f) for c in g) for f in summed",
        "unit/test_plan_report.py",
    ),
    # Traces and profiles
    Bug(
        "tracer: one step less",
        TRACER,
        "if self._tracing and step + 1 >= self._end:",
        "if self._tracing and step + 2 >= self._end:",
        UNIT["metrics"],
    ),
    Bug(
        "tracer: a request is answered again and again",
        TRACER,
        "            self._answered = asked\n",
        "",
        UNIT["metrics"],
    ),
    Bug(
        "profile: hidden links count as exposed",
        MEASURE,
        "made.hidden[origin] += took\n        first",
        "made.time[origin] += took\n        first",
        UNIT["profile"],
    ),
    Bug("profile: operations at once count twice", MEASURE, "took * n / work.total()", "took", UNIT["profile"]),
    Bug(
        "profile: idle is not divided by the steps",
        MEASURE,
        "(s.steps_ns - sum(s.time.values())) / NS_PER_MS / steps",
        "(s.steps_ns - sum(s.time.values())) / NS_PER_MS",
        UNIT["profile"],
    ),
    Bug(
        "profile: recomputation is told as backward",
        "jaxtrain/profile/parts.py",
        'return "recompute"',
        'return "backward"',
        UNIT["profile"],
    ),
    Bug(
        "profile's diff: before and after swapped",
        "jaxtrain/profile/diff.py",
        "before.get(name, 0.0), after.get(name, 0.0)",
        "after.get(name, 0.0), before.get(name, 0.0)",
        UNIT["profile"],
    ),
)

"""SIGKILL at random moments, many of them during a save: the result equals an uninterrupted run's, bit for bit."""

import signal
import time
from pathlib import Path

import runs
from faults import Faults, Figures, dice, same, saving, steps_written

STEPS = {False: 300, True: 1500}
KILLS = {False: (3, 2), True: (40, 15)}  # (kills in all, kills during a save at least)


def test_killed_at_random_moments(tmp_path: Path, whole: bool, figures: Figures) -> None:
    faults = Faults(tmp_path, train__steps=STEPS[whole], checkpoint__keep=3, log__every_steps=10)
    code, said = faults.start(tmp_path / "whole").end()
    assert code == 0, said
    rng, kills, inside, before, reached = dice("kill"), 0, 0, 0, []
    wanted, least = KILLS[whole]
    hunted = tmp_path / "hunted"
    while kills < wanted or inside < least:
        assert kills < 3 * wanted, f"only {inside} of them fell into a save"
        child, began = faults.start(hunted), time.time()
        if inside < least and rng.random() < 0.7:
            child.until(lambda began=began: saving(hunted, began))
            time.sleep(rng.uniform(0, 0.15))
        else:
            time.sleep(rng.uniform(0.2, 7))
        in_save = saving(hunted, began)
        child.process.kill()
        code, said = child.end()
        assert code == -signal.SIGKILL, f"it ended by itself, {code}: {said}"
        kills, inside, before = kills + 1, inside + in_save, before + (not runs.steps(hunted))
        reached.append(steps_written(hunted))
    code, said = faults.start(hunted).end()
    assert code == 0, said
    assert "passed over" not in said and "damaged" not in said
    assert same(runs.tensors(hunted), runs.tensors(tmp_path / "whole"))
    assert runs.exact(hunted) == runs.exact(tmp_path / "whole")
    figures.add("kill", kills=kills, inside_a_save=inside, before_the_first_checkpoint=before, steps=STEPS[whole])

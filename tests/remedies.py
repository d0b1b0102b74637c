"""The settings that a refusal names as its fix."""

import re

from jaxtrain.config.schema import Problem, all_keys


def named_fix(problem: Problem) -> str:
    """Return the settings that a message names: KEY=VALUE, a value for its key, or a multiple of a number."""
    remedy = problem.remedy
    if number := re.match(r"Set (\d[\d.e+-]*)(?= or |, or |\.$)", remedy):
        return f"{problem.key}={number[1]}"
    if pairs := re.findall(r"((?:\w+\.)+\w+=[^ ,;]+?)[.,;]?(?= |$)", remedy):
        return " ".join(pairs)
    if (other := re.match(r"Set ([\w.]+) to ([\w']+)", remedy)) and other[1] in all_keys():
        return f"{other[1]}={other[2]}"
    if whole := re.match(r"Make it a multiple of (\d+)", remedy):
        return f"{problem.key}={problem.value + -problem.value % int(whole[1])}"
    value = re.search(r"such as ([^ ,]*[^ ,.])", remedy)
    value = value or re.match(r"(?:Set one of|Set|Write|Use|Did you mean) ('[^']*'|[^ ,;?]*[^ ,;?.])", remedy)
    if value and value[1] in all_keys() and problem.key not in all_keys():
        return f"{value[1]}={problem.value}"
    return f"{problem.key}={value[1]}" if value else ""

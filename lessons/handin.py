"""`handin N`: one file to give to an instructor, who judges it again with `verify`.

The hash over a hand-in notices a file that was damaged, or edited by accident. It does not stop a forger, who
can compute it as well. So `verify` believes no number in the file: it runs the tests on the sources again, in
a copy of a release of that lesson, which does not hold the lesson's answers. The dates in it are those of the
student's own clock.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from lessons import late, outside, registry
from lessons.check import graded
from lessons.exercise import find_lesson, shown
from lessons.grade import most
from lessons.progress import accepted_tasks

KIND = "a hand-in of python -m lessons, version 2"
KINDS = (KIND, "a hand-in of python -m lessons, version 1")  # which had no dates


def digest(content: dict[str, Any]) -> str:
    """The hash over everything in a hand-in but itself."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def handin(numbers: Sequence[str], name: str) -> int:
    """Check these lessons now, as `verify` will, and write the file.

    It holds sources, what was said of them, points, dates, versions and the hash.
    """
    lessons = [find_lesson(number) for number in dict.fromkeys(numbers)]
    entries = []
    for lesson in lessons:
        print(f"checking lesson {lesson.number} ...", flush=True)
        report = graded(lesson, sandboxed=True)
        sources = {work.name: work.read_text(encoding="utf-8") for _, work in lesson.files}
        for line in outside.reaching(sources) or report["reached"]:
            print(f"  verify will give 0 points, because this reaches outside of the exercise: {line}")
        print(f"  {report['points']:g} of {report['of']} points", flush=True)
        entries.append({"report": report, "sources": sources, "accepted": accepted_tasks(lesson)})
    content: dict[str, Any] = {
        "kind": KIND,
        "name": name,
        "made": late.now(),
        "points": round(sum(entry["report"]["points"] for entry in entries), 2),
        "of": sum(most(lesson) for lesson in lessons),
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        "lessons": entries,
    }
    content["sha256"] = digest(content)
    labels = "_".join(lesson.label.replace("_", "-") for lesson in lessons)
    place = registry.WORK / f"handin_{labels}.json"
    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{content['points']:g} of {content['of']} points. Hand in {shown(place)}")
    return 0

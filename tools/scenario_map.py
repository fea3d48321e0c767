#!/usr/bin/env python3
"""Which test serves which row of tests/scenarios/rows.txt, and which rows have none.

    tools/scenario_map.py [--missing]      # exit code 1 if a row has neither a test nor a reason

A test serves a row by carrying its id in its name: TEST(Fsdp, F_005_module_used_twice) serves F-005. Python tests and
scripts say `serves: F-005` in a comment.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_rows(path):
    rows, heading = {}, ""
    last = None
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.strip().startswith("LEFT OUT: "):
            rows[last]["left_out"] = line.strip()[len("LEFT OUT: "):]
        elif re.match(r"[A-Z]+-\d+ ", line):
            last, text = line.split(" ", 1)
            rows[last] = dict(heading=heading, text=text, tests=[], left_out="")
    return rows


def find_tests():
    """(id, file:line, name of the test)"""
    for path in sorted((ROOT / "tests").rglob("*")):
        if path.suffix not in (".cc", ".py", ".sh") or not path.is_file():
            continue
        text = path.read_text()
        for m in re.finditer(r"\b(?:TEST|TEST_F|TEST_P)\(\s*(\w+),\s*(\w+)\s*\)", text):
            for letters, digits in re.findall(r"(?:^|_)([A-Z]+)_(\d{2,3})(?=_|$)", m[2]):
                line = text.count("\n", 0, m.start()) + 1
                yield letters + "-" + digits, "{}:{}".format(path.relative_to(ROOT), line), m[1] + "." + m[2]
        for m in re.finditer(r"serves: ([A-Z]+-\d+)", text):
            yield m[1], "{}:{}".format(path.relative_to(ROOT), text.count("\n", 0, m.start()) + 1), path.name


def main():
    rows = read_rows(ROOT / "tests/scenarios/rows.txt")
    unknown = []
    for row, place, name in find_tests():
        if row in rows:
            rows[row]["tests"].append(place + " " + name)
        else:
            unknown.append("{} {}: no such row as {}".format(place, name, row))
    missing = [r for r in rows if not rows[r]["tests"] and not rows[r]["left_out"]]
    if "--missing" not in sys.argv[1:]:
        heading = None
        for row, r in rows.items():
            if r["heading"] != heading:
                heading = r["heading"]
                print("\n" + heading)
            print("{:6} {}".format(row, r["tests"][0] if r["tests"] else
                                   "left out: " + r["left_out"] if r["left_out"] else "MISSING"))
            for t in r["tests"][1:]:
                print("       " + t)
    else:
        for row in missing:
            print(row, rows[row]["text"][:110])
    for u in unknown:
        print(u)
    served = sum(bool(r["tests"]) for r in rows.values())
    left_out = sum(bool(r["left_out"] and not r["tests"]) for r in rows.values())
    print("\n{} rows: {} with tests, {} left out with a reason, {} missing".format(len(rows), served, left_out, len(missing)))
    return 1 if missing or unknown else 0


if __name__ == "__main__":
    sys.exit(main())

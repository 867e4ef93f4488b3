"""Prints README.md's outputs anew: `python -m tests.readme [WORD ...]`, of the commands that hold one of the words, or of all.

A fenced block after a line `<!-- output of: COMMAND -->` holds what the command printed. Figures are of the machine this runs on.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- output of: (.+?) -->\n```\w*\n)(.*?)(?=```)", re.DOTALL)


def output(command: str) -> str:
    """What a command prints, run in the project's root; paths are relative to it.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    print(command, file=sys.stderr)
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return done.replace(f"{ROOT}/", "").strip("\n") + "\n"


def main(words: list[str]) -> None:
    """Replace the blocks."""
    path = ROOT / "README.md"

    def renew(block: re.Match[str]) -> str:
        head, command, old = block.groups()
        wanted = not words or any(w in command for w in words)
        return head + (output(command) if wanted else old)

    path.write_text(BLOCK.sub(renew, path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])

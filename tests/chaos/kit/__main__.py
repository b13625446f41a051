"""`scripts/chaos --minutes N --seed S`: break a run again and again, and print one JSON line.

Exit code 0: every fault ended recovered or failed cleanly, and the history is right; 1: not so (the report says what).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from kit import plan, report, settings
from kit.engines import Engines
from kit.launch import Cold, Launcher, Warm
from kit.session import Result, Session


def main() -> int:
    """Read the options, and run one session."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=None, help="stop breaking things after so many minutes")
    parser.add_argument("--faults", type=int, default=None, help="stop after so many faults (default 20, or --minutes)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--folder", type=Path, default=None, help="for the run and the report; a new one by default")
    parser.add_argument("--warm", action="store_true", help="fork a warm Python instead of starting the command")
    parser.add_argument("--parts", default=",".join(plan.PARTS), help="what is broken (default %(default)s)")
    parser.add_argument("--served", type=int, default=0, metavar="N", help="generate on N servers, as part `engine`")
    parser.add_argument("--dead-s", type=float, default=5.0, help="after so long a part counts as dead (default 5)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the run")
    given = parser.parse_args()
    count = 20 if given.faults is None and given.minutes is None else given.faults
    folder: Path = given.folder or Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)

    def tell(result: Result) -> None:
        report.write_result(folder, result)
        sys.stderr.write(f"{result.fault.number}. {result.fault}: {result.outcome}, {result.seconds:.1f} s. ")
        sys.stderr.write(f"{result.reason}\n{''.join(f'   left: {left}' + chr(10) for left in result.left)}")
        sys.stderr.flush()

    launcher: Launcher = Warm() if given.warm else Cold()
    parts = [*given.parts.split(","), *(["engine"] if given.served else [])]
    limits = settings.Limits(dead_s=given.dead_s, recovered_s=50.0 + 2 * given.dead_s)
    engines = Engines(folder.absolute(), given.served) if given.served else None
    try:
        session = Session(
            folder.absolute(),
            launcher,
            limits=limits,
            options=dict(word.split("=", 1) for word in given.set),
            engines=engines,
            tell=tell,
        )
        tally = session.run(
            plan.draw(given.seed, limit_s=limits.dead_s, parts=parts),
            count=count,
            seconds=None if given.minutes is None else 60 * given.minutes,
        )
    finally:
        launcher.close()
        if engines is not None:
            engines.close()
    report.write_page(folder, tally, seed=given.seed)
    sys.stderr.write(f"the report is {folder / report.PAGE}\n")
    sys.stdout.write(json.dumps(tally.line) + "\n")
    return 0 if tally.ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""Write what code declares: the docs' tables (make docs)."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from llm_train_bench.settings.rules import combinations_table

DOCS = Path(__file__).parent
COMBINATIONS = re.compile(r"<!-- combinations -->\n\n\|.*?\n\n(- .*\n)+", re.DOTALL)


def with_tables(page: str) -> str:
    """A page with its tables as the code declares them."""
    return COMBINATIONS.sub(f"<!-- combinations -->\n\n{combinations_table()}\n", page)


def main() -> None:
    """Rewrite the pages that differ."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := with_tables(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""docs/openapi.yaml: python -m hetero.server.openapi > docs/openapi.yaml."""

from __future__ import annotations

import sys
from typing import Any

from hetero.server.openapi.document import document


def render_docs() -> str:
    """docs/openapi.yaml. Schemas that several routes share are written out at each."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    head = "# Written by `make docs`; a running server has it at /openapi.json.\n"
    return head + yaml.dump(document(), Dumper=Plain, sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    sys.stdout.write(render_docs())

"""What the README says works is backed by a test that exists."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r'\[\w+\]\((tests/[\w/.]+) "(\w+)"\)')


def test_names_of_tests_behind_the_table_exist():
    links = LINK.findall((ROOT / "README.md").read_text())
    assert len(links) > 50
    for file, name in links:
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert name in functions, (file, name)

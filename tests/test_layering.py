"""Who may import whom: the table of the design, enforced over the syntax trees."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

KERNELS = r"pallas_kernels(\.\w+\.api|\.numerics|\.dispatch|\.measure\.timing)?"
"""Of the kernels, others see the signatures only, and the stopwatch."""

STATE = r"kvjax\.(types|cache(\..+)?)"

PLACE = r"kvjax\.(types|policy\.(errors|observation|part))"
"""Of the policy, the modules of its places see what all parts are."""

LOOP = r"decode\.(requests|rooms|sizes|walk|weights)"
"""What the host's loops share; none of it knows a loop."""

# The longest name that begins a module's name gives the rule: a pattern for what it may import of ours.
TABLE = {
    "pallas_kernels": r"pallas_kernels(\..+)?",
    "kvjax.types": r"(?!)",
    "kvjax.cache": STATE,
    "kvjax.sampling": STATE,
    "kvjax.policy": r"kvjax\.policy\..+",
    "kvjax.policy.errors": r"(?!)",
    "kvjax.policy.observation": r"kvjax\.(types|policy\.errors)",
    "kvjax.policy.part": r"kvjax\.(types|policy\.observation)",
    "kvjax.policy.admission": PLACE,
    "kvjax.policy.eviction": rf"{PLACE}|kvjax\.cache\.pages",
    "kvjax.policy.selection": rf"{PLACE}|kvjax\.cache\.pages",
    "kvjax.policy.storage": rf"{PLACE}|kvjax\.cache\.(pages|write)",
    "kvjax.policy.budget": PLACE,
    "kvjax.policy.completion": PLACE,
    "kvjax.budgets": rf"{STATE}|kvjax\.policy|kvjax\.budgets(\..+)?",
    "kvjax.storage": rf"{STATE}|kvjax\.policy|kvjax\.storage\.codes|{KERNELS}",
    "kvjax.policies": rf"{STATE}|kvjax\.policy|kvjax\.budgets\..+|{KERNELS}",
    "kvjax.models": r"kvjax\.types|kvjax\.models(\..+)?",
    "kvjax.text": r"kvjax\.models\.spec",
    "kvjax.loading": r"kvjax\.(types|text|models(\..+)?)",
    "kvjax.metrics": STATE,
    "kvjax.ageing": rf"{STATE}|kvjax\.policy",
    "kvjax.layer": r"kvjax\.layer\..+",
    "kvjax.layer.site": rf"{STATE}|kvjax\.policy",
    "kvjax.layer.reading": rf"{STATE}|kvjax\.(policy|layer\.site)|{KERNELS}",
    "kvjax.layer.mass": rf"{STATE}|kvjax\.(policy|layer\.(site|reading))",
    "kvjax.layer.eviction": rf"{STATE}|kvjax\.(policy|ageing|layer\.site)",
    "kvjax.layer.door": rf"{STATE}|kvjax\.(policy|ageing|layer\.(site|eviction))",
    "kvjax.layer.prompts": rf"{STATE}|kvjax\.(policy|layer\.(site|reading|mass|door))|{KERNELS}",
    "kvjax.layer.visits": rf"{STATE}|kvjax\.(policy|ageing|layer\.(?!prompts).+)|{KERNELS}",
    "kvjax.learned": r"kvjax(\.(types|policy))?",
    "kvjax.torch_file": r"(?!)",
    "kvjax.gates": rf"kvjax\.(types|learned|loading|torch_file|models\.hf_config|policies\.wg_kv)|{KERNELS}",
    "kvjax.decode": r"kvjax\.decode\..+",
    "kvjax.decode.sizes": r"(?!)",
    "kvjax.decode.requests": r"kvjax\.(types|cache\.state)",
    "kvjax.decode.rooms": rf"{STATE}|kvjax\.(policy|decode\.sizes)",
    "kvjax.decode.weights": r"kvjax\.(types|policy|learned)",
    "kvjax.decode.walk": r"kvjax\.(types|cache\.state|policy|layer|decode\.weights)",
    "kvjax.decode.chunks": rf"{STATE}|kvjax\.(policy|metrics|{LOOP})",
    "kvjax.decode.layerwise": rf"{STATE}|kvjax\.(policy|ageing|layer|metrics|{LOOP})",
    "kvjax.decode.prompts": rf"{STATE}|kvjax\.(policy|decode\.(chunks|layerwise)|{LOOP})",
    "kvjax.decode.segments": r"kvjax\.(types|cache\.state|policy|sampling|decode\.walk)",
    "kvjax.decode.generation": rf"{STATE}|kvjax\.(policy|learned|metrics|sampling|{LOOP})"
    r"|kvjax\.decode\.(prompts|segments)",
    "kvjax.discovery": r"kvjax\.(policy|policies|budgets|storage)",
    "kvjax.compose": r"kvjax\.(policy|discovery)",
    "kvjax.methods_table": r"kvjax\.(policy|compose|discovery)",
    "kvjax.bench": rf"kvjax(\.(?!serve).+)?|{KERNELS}",
    "kvjax.engine": r"kvjax\.(?!serve|eval|models|policies).+",
    "kvjax.serve": r"kvjax(\.(?!eval).+)?",
    "kvjax.eval": r"kvjax(\.(?!serve).+)?",
    "kvjax": r"kvjax\.(?!serve|eval|models|policies|text).+",
    "train": rf"train(\..+)?|kvjax(\.(?!serve).+)?|pallas_kernels\.measure\.aot|{KERNELS}",
}


def sources() -> dict[str, str]:
    """Module name to source of everything that is ours."""
    files = [f for top in ("kvjax", "pallas_kernels", "train") for f in sorted((ROOT / top).rglob("*.py"))]
    return {_name(f): f.read_text() for f in files}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, source: str, known: set[str]) -> set[str]:
    """Modules of ours that a source names anywhere, inside functions and type-checking blocks too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else str(node.module))
    return {name for name in found if name.split(".")[0] in ("kvjax", "pallas_kernels", "train")}


def violations(given: dict[str, str]) -> list[str]:
    """``"importer -> imported"`` for everything the table does not allow."""
    known = set(sources()) | set(given)
    broken = []
    for module, source in given.items():
        rules = [name for name in TABLE if module == name or module.startswith(name + ".")]
        rule = max(rules, key=len)
        if rule == "kvjax" and module != "kvjax":
            broken.append(f"{module} has no row in the table")
            continue
        names = imported(module, source, known)
        broken += [f"{module} -> {name}" for name in sorted(names) if not re.fullmatch(TABLE[rule], name)]
    return broken


def test_everyone_imports_only_what_the_table_allows():
    given = sources()
    assert len(given) > 40, "the sources were not found"
    assert violations(given) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvjax.policies.new", "from kvjax.policies.snapkv import SnapKV"),
        ("kvjax.policies.new", "def f():\n    from kvjax import decode"),
        ("kvjax.policies.new", "from pallas_kernels.blockwise import xla"),
        ("kvjax.models.decoder", "import kvjax.cache.state"),
        ("kvjax.policies.new", "from kvjax.policy.joined import Policy"),
        ("kvjax.policy.part", "from kvjax.cache.pages import Slots"),
        ("kvjax.policy.budget", "from kvjax.policy.eviction import Eviction"),
        ("kvjax.decode", "from kvjax.models import decoder"),
        ("kvjax.decode.walk", "from kvjax.decode import generation"),
        ("kvjax.cache.pages", "from kvjax.policy import Part"),
        ("kvjax.engine", "from kvjax.serve import chat"),
        ("kvjax", "from kvjax.models.hf import load"),
        ("pallas_kernels.phi.api", "import kvjax"),
        ("train.gates", "import kvjax.serve.answer"),
        ("kvjax.helpers", ""),
    ],
)
def test_a_planted_violation_is_seen(module, source):
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize("package", ["kvjax.policy", "kvjax.layer", "kvjax.decode"])
def test_no_module_is_hidden_by_a_name_that_its_package_gives(package):
    given = set(importlib.import_module(package).__all__)
    modules = {name.rpartition(".")[2] for name in sources() if name.rpartition(".")[0] == package}
    assert len(modules) > 5
    assert not given & modules

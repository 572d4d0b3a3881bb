"""Who may import whom: the table below, enforced over the syntax trees."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("kvjax", "pallas_kernels", "benchmarks", "train", "studies")

WEIGHTS = r"kvjax\.(types|version|weights\._.+)"
"""Learned weights."""

KERNELS = r"pallas_kernels(\.\w+\.api|\.numerics|\.dispatch|\.measure\.(timing|child))?"
"""Of the kernels, others see the signatures only, the stopwatch and the child process."""

STATE = r"kvjax\.(errors|types|cache(\..+)?|sharding(\..+)?)"

TRAINED = rf"kvjax(\.(?!serve).+)?|pallas_kernels\.measure\.(aot|chips)|{KERNELS}"
"""What trainers use of the library."""

PLACE = r"kvjax\.(types|sharding\.all_heads|algebra\._(errors|observation|part))"
"""Of the algebra, the modules of its places see what all parts are."""

# The longest name that begins a module's name gives the rule: a pattern for what it may import of ours.
TABLE = {
    "pallas_kernels": r"pallas_kernels(\..+)?",
    "kvjax.errors": r"(?!)",
    "kvjax.types": r"(?!)",
    "kvjax.version": r"(?!)",
    "kvjax.sharding": r"kvjax\.(errors|types|sharding\..+)",
    "kvjax.sharding.all_heads": r"(?!)",
    "kvjax.sharding.head_order": r"kvjax\.types",
    "kvjax.sharding.specs": r"(?!)",
    "kvjax.cache": STATE,
    "kvjax.sampling": STATE,
    "kvjax.algebra": r"kvjax\.(sharding\.all_heads|algebra\._.+)",
    "kvjax.algebra._errors": r"kvjax\.errors",
    "kvjax.algebra._arguments": r"kvjax\.algebra\._errors",
    "kvjax.algebra._observation": r"kvjax\.(types|sharding\.all_heads|algebra\._errors)",
    "kvjax.algebra._part": r"kvjax\.(types|algebra\._(arguments|errors|observation))",
    "kvjax.algebra._admission": PLACE,
    "kvjax.algebra._replay": r"kvjax\.(types|algebra\._observation)",
    "kvjax.algebra._eviction": rf"{PLACE}|kvjax\.(cache\.pages|algebra\._replay)",
    "kvjax.algebra._selection": rf"{PLACE}|kvjax\.cache\.pages",
    "kvjax.algebra._storage": rf"{PLACE}|kvjax\.cache\.(pages|write)",
    "kvjax.algebra._budget": rf"{PLACE}|kvjax\.algebra\._arguments",
    "kvjax.algebra._completion": PLACE,
    "kvjax.algebra._wrapper": rf"{PLACE}|kvjax\.algebra\._(arguments|eviction|replay)",
    "kvjax.algebra._policy": r"kvjax\.(algebra\._.+|cache\.hosted)",
    "kvjax.budgets": rf"{STATE}|kvjax\.algebra|kvjax\.budgets(\..+)?",
    "kvjax.storage": rf"{STATE}|kvjax\.algebra|kvjax\.storage\.codes|{KERNELS}",
    "kvjax.storage.host": rf"{STATE}|kvjax\.algebra|kvjax\.storage\.(codes|int4|int8)",
    "kvjax.policies": rf"{STATE}|kvjax\.algebra|kvjax\.budgets\..+|{KERNELS}",
    "kvjax.models": r"kvjax\.(errors|nnx|types|sharding\.(consistency|mesh|specs))|kvjax\.models(\..+)?",
    "kvjax.models.decoder": r"kvjax\.(types|sharding\..+|models\..+)",
    "kvjax.chat_template": r"kvjax\.errors",
    "kvjax.text": r"kvjax\.(chat_template|models\.spec)",
    "kvjax.laws": r"kvjax\.(errors|types)",
    "kvjax.nnx": r"(?!)",
    "kvjax.flax": rf"{STATE}|kvjax\.(nnx|algebra|decode|weights|flax\._.+)",
    "kvjax.loading": r"kvjax\.(types|text|weights|sharding(\..+)?|models(\..+)?)",
    "kvjax.metrics": STATE,
    "kvjax.programs": r"(?!)",
    "kvjax.reads": r"(?!)",
    "kvjax.layer": r"kvjax\.layer\._.+",
    "kvjax.layer._info": rf"{STATE}|kvjax\.algebra",
    "kvjax.layer._hosted": rf"{STATE}|kvjax\.algebra|{KERNELS}",
    "kvjax.layer._demote": rf"{STATE}|kvjax\.algebra",
    "kvjax.layer._held": rf"{STATE}|kvjax\.(algebra|layer\._(demote|info|rows))",
    "kvjax.layer._evict": rf"{STATE}|kvjax\.(algebra|layer\._(demote|held|info))",
    "kvjax.layer._admit": rf"{STATE}|kvjax\.(algebra|layer\._(demote|info|evict))",
    "kvjax.layer._draft": rf"{STATE}|kvjax\.(algebra|layer\._(admit|info|read))|{KERNELS}",
    "kvjax.layer._one_kernel": rf"{STATE}|kvjax\.(algebra|layer\._(admit|info|read))|{KERNELS}",
    "kvjax.layer._read": rf"{STATE}|kvjax\.(algebra|layer\._(hosted|info))|{KERNELS}",
    "kvjax.layer._attend": rf"{STATE}|kvjax\.(algebra|layer\._(info|read))",
    "kvjax.layer._mass": rf"{STATE}|kvjax\.(algebra|layer\._(info|read))",
    "kvjax.layer._prompt": rf"{STATE}|kvjax\.(algebra|layer\._(info|read|mass|admit))|{KERNELS}",
    "kvjax.layer._replay": rf"{STATE}|kvjax\.(algebra|layer\._(info|read|prompt))|{KERNELS}",
    "kvjax.layer._rows": r"kvjax\.(algebra|layer\._info)",
    "kvjax.layer._step": rf"{STATE}|kvjax\.layer\._(?!prompt).+|{KERNELS}",
    "kvjax.weights": rf"{WEIGHTS}|kvjax\.(algebra|catalogue|sharding\.head_order)",
    "kvjax.weights.gates": r"kvjax\.(types|weights|loading|weights\.torch_file|policies\.wg_kv)",
    "kvjax.weights.published": r"kvjax\.(types|algebra|weights(\.(gates|torch_file))?|loading)"
    r"|kvjax\.policies\.(wg_kv|kvzap|fast_kvzip)|kvjax\.budgets\.lu_kv",
    "kvjax.weights.torch_file": r"kvjax\.errors",
    "kvjax.weights.__main__": r"kvjax\.(cli|weights(\..+)?)",
    "kvjax.timing": r"pallas_kernels\.measure\.timing",
    "kvjax.launch": r"kvjax\.(cli|version|sharding(\.(consistency|lost))?)",
    "kvjax.cli": r"kvjax\.(errors|programs|types)|pallas_kernels\.records",
    "kvjax.tune": r"kvjax(\.cli)?|pallas_kernels(\.(dispatch|records|measure\.(device|work)))?",
    "kvjax.doctor": r"kvjax(\.(cli|tune))?|pallas_kernels(\.(dispatch|records|measure\.work))?",
    "kvjax.decode": r"kvjax\.decode\._.+",
    "kvjax.decode._capacity": rf"{STATE}|kvjax\.(algebra|catalogue)",
    "kvjax.decode._placement": rf"{STATE}|kvjax\.(algebra|layer|metrics|weights|decode\._checks)",
    "kvjax.decode._checks": r"kvjax\.(errors|types|cache\.state|algebra|catalogue|weights|decode\._capacity)",
    "kvjax.decode._step": r"kvjax\.(types|sharding\.specs|cache\.(mapped|state)|algebra|layer)",
    "kvjax.decode._by_layer": rf"{STATE}|kvjax\.(algebra|layer|decode\._step)",
    "kvjax.decode._loop": rf"{STATE}|kvjax\.(algebra|sampling|decode\._(step|by_layer))",
    "kvjax.decode._draft": rf"{STATE}|kvjax\.(algebra|layer|decode\._(draft_length|loop|step))",
    "kvjax.decode._draft_length": r"(?!)",
    "kvjax.decode._prefill": rf"{STATE}|kvjax\.(algebra|catalogue|layer|metrics|decode\._(?!generate).+)",
    "kvjax.decode._whole_prompt": rf"{STATE}|kvjax\.(algebra|layer|metrics)"
    r"|kvjax\.decode\._(activations|behind|by_layer|capacity|checks|replay)",
    "kvjax.decode._replay": rf"{STATE}|kvjax\.(algebra|layer|text|decode\._(capacity|checks))",
    "kvjax.decode._behind": rf"{STATE}|kvjax\.(algebra|layer)",
    "kvjax.decode._activations": rf"{STATE}|kvjax\.(algebra|layer|decode\._(by_layer|capacity|checks))",
    "kvjax.decode._generate": rf"{STATE}|kvjax\.(algebra|catalogue|weights|metrics|sampling|decode\._.+)",
    "kvjax.catalogue": r"kvjax\.(algebra|policies|budgets(\.amount)?|storage|catalogue\._.+)",
    "kvjax.catalogue._table": r"kvjax\.(cli|algebra|catalogue\._.+)",
    "kvjax.catalogue.__main__": r"kvjax\.(cli|catalogue\._table)",
    "kvjax.saving": rf"{STATE}|kvjax\.(algebra|catalogue|weights|saving\._.+)",
    "kvjax.plan": r"kvjax(\.(?!serve|eval|engine).+)?|pallas_kernels\.measure\.(aot|chips)",
    "benchmarks": r"benchmarks(\.(?!kernels).+)?|benchmarks\.kernels\.__main__"
    rf"|kvjax(\.(?!serve).+)?|{KERNELS}",
    "benchmarks.kernels": r"benchmarks\.kernels(\..+)?|pallas_kernels(\..+)?",
    "kvjax.engine": r"kvjax\.(?!serve|eval|models|policies).+",
    "kvjax.engine.errors": r"kvjax\.errors",
    "kvjax.engine.compiler": r"kvjax\.programs",
    "kvjax.engine.settings": r"kvjax\.(types|decode|sharding\.(mesh|specs))",
    "kvjax.engine.request": r"kvjax\.(types|algebra|decode|weights|sharding\.mesh)",
    "kvjax.engine.metrics": rf"{STATE}|kvjax\.(metrics|engine\.(decoding|request))",
    "kvjax.engine.ticket": rf"{STATE}|kvjax\.(algebra|decode|sampling)"
    r"|kvjax\.engine\.(decoding|request|metrics|prefix)",
    "kvjax.engine.pages": rf"{STATE}|kvjax\.(algebra|decode|metrics)",
    "kvjax.engine.prefix": rf"{STATE}|kvjax\.(algebra|decode|engine\.pages)",
    "kvjax.engine.contexts": r"kvjax\.(types|algebra|decode|saving|weights)"
    r"|kvjax\.engine\.(errors|held_context|request|settings|ticket)",
    "kvjax.engine.held_context": r"kvjax\.(types|algebra|metrics|saving|weights)"
    r"|kvjax\.engine\.(pages|request|settings)",
    "kvjax.engine.programs": rf"{STATE}|kvjax\.decode|kvjax\.engine\.(compiler|decoding)",
    "kvjax.engine.structure": rf"{STATE}|kvjax\.(algebra|decode)"
    r"|kvjax\.engine\.(compiler|decoding|pages|request)",
    "kvjax.engine.batch": rf"{STATE}|kvjax\.(algebra|decode|layer|metrics|sampling)"
    r"|kvjax\.engine\.(decoding|compiler|metrics|pages|programs|request|structure|ticket)",
    "kvjax.engine.memory": rf"{STATE}|kvjax\.(algebra|decode|metrics)"
    r"|kvjax\.engine\.(decoding|batch|contexts|drafted|errors|guided|pages|prefix|programs|request|settings)"
    r"|kvjax\.engine\.(structure|ticket)",
    "kvjax.grammar": r"kvjax\.(engine|text)",
    "kvjax.serve": r"kvjax(\.(?!eval).+)?",
    "kvjax.eval": r"kvjax(\.(?!serve).+)?",
    "kvjax": r"kvjax\.(?!serve|eval|models|policies|text).+",
    "train": rf"train(\.(?!embedded).+)?|{TRAINED}",
    "train.gate_rows": rf"train(\.(?!embedded).+)?|train\.embedded\.data|{TRAINED}",
    "train.trace_rows": rf"train(\.(?!embedded).+)?|train\.embedded\.(tasks|data)|{TRAINED}",
    "train.embedded.tasks": r"train(\.(rows|text|embedded\.tasks(\..+)?))?|kvjax(\.(?!serve).+)?",
    "train.embedded": rf"train(\..+)?|{TRAINED}",
    "studies": r"kvjax(\.(?!serve).+)?",
    "studies.devices": r"pallas_kernels\.measure\.chips|kvjax(\.(?!serve).+)?",
    "studies.plan_host": r"pallas_kernels\.measure\.(aot|chips)|kvjax(\.(?!serve).+)?",
    "studies.cost": r"benchmarks\.random_model|kvjax(\.(?!serve).+)?",
    "studies.claims": r"studies\.judges|kvjax\.(cli|eval\..+)",
    "studies.topk_phi": r"studies\.topk_phi(\..+)?|benchmarks(\..+)?|train(\..+)?|kvjax(\.(?!serve).+)?"
    r"|pallas_kernels\.(blockwise|phi)\.api",
    "studies.conf_kv": r"studies\.conf_kv(\..+)?|kvjax(\.(?!serve).+)?",
    "studies.gvote": r"studies\.(gvote(\..+)?|processor)|kvjax(\.(?!serve).+)?",
    "studies.wg_kv": r"studies\.wg_kv(\..+)?|train(\..+)?|kvjax(\.(?!serve).+)?",
    "studies.kvp": r"studies\.(kvp(\..+)?|judges|processor)|train(\..+)?|kvjax(\.(?!serve).+)?",
}


@functools.cache
def sources() -> dict[str, str]:
    """Module name to source of everything that is ours."""
    files = [file for top in OURS for file in sorted((ROOT / top).rglob("*.py"))]
    return {_name(f): f.read_text() for f in files}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_nodes(source: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(module: str, source: str, known: set[str]) -> set[str]:
    """Modules of ours that a source names anywhere, inside functions and type-checking blocks too."""
    names: set[str] = set()
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{module}: imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in known else str(node.module))
    return {name for name in names if name.split(".")[0] in OURS}


def violations(code: dict[str, str]) -> list[str]:
    """``"importer -> imported"`` for everything the table does not allow."""
    known = set(sources()) | set(code)
    broken = []
    for module, source in code.items():
        rules = [name for name in TABLE if module == name or module.startswith(name + ".")]
        rule = max(rules, key=len)
        if rule == "kvjax" and module != "kvjax":
            broken.append(f"{module} has no row in the table")
            continue
        names = imported(module, source, known)
        broken += [f"{module} -> {name}" for name in sorted(names) if not re.fullmatch(TABLE[rule], name)]
    return broken


def test_everyone_imports_only_what_the_table_allows():
    code = sources()
    assert len(code) > 40, "the sources were not found"
    assert violations(code) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvjax.policies.new", "from kvjax.policies.snapkv import SnapKV"),
        ("kvjax.policies.new", "def f():\n    from kvjax import decode"),
        ("kvjax.policies.new", "from pallas_kernels.blockwise import xla"),
        ("kvjax.models.decoder", "import kvjax.cache.state"),
        ("kvjax.policies.new", "from kvjax.algebra._policy import Policy"),
        ("kvjax.algebra", "from kvjax.cache.pages import Slots"),
        ("kvjax.algebra", "from kvjax.algebra import Eviction"),
        ("kvjax.decode", "from kvjax.models import decoder"),
        ("kvjax.decode._step", "from kvjax.decode import _generate"),
        ("kvjax.cache.pages", "from kvjax.algebra import Part"),
        ("kvjax.engine", "from kvjax.serve import chat"),
        ("kvjax", "from kvjax.models.hf import load"),
        ("pallas_kernels.phi.api", "import kvjax"),
        ("train.gates", "import kvjax.serve.answer"),
        ("kvjax.weights._auto", "import kvjax"),
        ("train.gates", "from train.embedded import recall"),
        ("kvjax.helpers", ""),
    ],
)
def test_a_planted_violation_is_seen(module, source):
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    "package", ["kvjax", "kvjax.algebra", "kvjax.layer", "kvjax.decode", "kvjax.catalogue", "kvjax.weights"]
)
def test_no_module_is_hidden_by_a_name_that_its_package_gives(package):
    names = set(importlib.import_module(package).__all__)
    modules = {name.rpartition(".")[2] for name in sources() if name.rpartition(".")[0] == package}
    assert len(modules) > 3
    assert not names & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more modules that import each other, directly or round a corner (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return groups


def import_graph(code: dict[str, str]) -> dict[str, set[str]]:
    """Who imports whom, imports inside functions and for types alone included."""
    known = set(code)
    graph = {name: imported(name, source, known) & known for name, source in code.items()}
    fronts = {name for name in known if any(other.startswith(name + ".") for other in known)}
    # A module that imports its own package's front, or a front its modules, is no circle of ideas.
    return {
        name: {other for other in others if not (other in fronts and name.startswith(other + "."))} - {name}
        for name, others in graph.items()
    }


def test_no_module_imports_itself_round_a_corner():
    assert circles(import_graph(sources())) == []


def test_a_planted_circle_is_seen():
    graph = import_graph({"kvjax.a": "import kvjax.b", "kvjax.b": "def f():\n    from kvjax import a"})
    assert circles(graph) == [["kvjax.a", "kvjax.b"]]


FLAX = {"kvjax.models.module", "kvjax.nnx"}


def test_flax_is_imported_by_training_and_what_serves_flax_modules_alone():
    code, module = sources(), "kvjax.models.module"
    of_flax = {name for name, text in code.items() if re.search(r"^\s*(from|import) flax\b", text, re.M)}
    users = {name for name, text in code.items() if module in imported(name, text, set(code))}
    assert {name for name in of_flax | users if not name.startswith("train.")} == FLAX


def test_the_decode_loop_never_sees_flax():
    """``kvjax.flax`` is beside it; ``load`` imports what reads a module when it is given one."""
    code = sources()
    users = {name for name, text in code.items() if "kvjax.nnx" in imported(name, text, set(code))}
    assert users == {"kvjax.flax._causal_lm", "kvjax.models.own"}
    users = {name for name, text in code.items() if "kvjax.models.own" in imported(name, text, set(code))}
    assert users == {"kvjax.loading"}


def test_no_module_is_called_policy():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvjax.policy")

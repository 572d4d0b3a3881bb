# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: NONE
# ---

# %% [markdown]
# # A method of your own in ten lines
#
# An eviction is a score for every token of a prompt. This notebook writes one, holds it to three laws, and
# draws its curve beside five published methods. It runs on a CPU.

# %%
# The runtime's jax stays: it is asked for by its version, and pip leaves it alone, or says why it cannot.
KVJAX = ""  # a checkout or a wheel on this machine, such as "/content/kvjax"; "" where kvjax is installed

if KVJAX:
    import subprocess
    import sys
    from importlib.metadata import version

    pip = [sys.executable, "-m", "pip", "install", "--quiet", KVJAX, f"jax=={version('jax')}"]
    subprocess.run(pip, check=True)

# %%
from kvjax import doctor

doctor.need("plot")
print("\n".join((*doctor.software(), *doctor.devices())))

# %%
import dataclasses

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.algebra import Eviction
from kvjax.budgets.uniform import Uniform

model = kvjax.load()
text = model.text

# %% [markdown]
# The whole method. `needs` says what it wants to see, `score_prompt` gets it for B rows, K KV heads and T
# tokens of one layer, and the tokens with the highest scores stay. Here: keys that point away from the mean
# of the 32 keys before them, so that a new topic stays and its repetition does not. KeyDiff compares with all
# keys.


# %%
@dataclasses.dataclass(frozen=True, repr=False)
class Novelty(Eviction):
    """Score = minus the cosine of a key and the mean of the 32 before it."""

    name = "novelty"
    needs = frozenset({"k"})
    scores_prompt = True

    def score_prompt(self, params, observed):
        """[B, K, T]."""
        unit = observed.k / jnp.linalg.norm(observed.k, axis=-1, keepdims=True)  # [B, K, T, H]
        sums = jnp.pad(jnp.cumsum(unit, axis=2), ((0, 0), (0, 0), (33, 0), (0, 0)))
        before = sums[:, :, 32:-1] - sums[:, :, :-33]  # of tokens t - 32 to t - 1
        return -(unit * before).sum(-1) / jnp.linalg.norm(before, axis=-1).clip(1e-6)


novelty = kvjax.Policy(eviction=Novelty(), budget=Uniform(0.25), sinks=4)
print(novelty)

# %% [markdown]
# ## Three laws
#
# Prompts with a number in them, each with its question.

# %%
rng = np.random.default_rng(0)
words = "The road went on between the trees, and the evening was quiet and cold. "


def prompt(number):
    before = int(rng.integers(1, 7))
    filler = words * before, words * (8 - before)
    needle = f"The secret number for apple-river is {number}. "
    question = "What is the secret number for apple-river? The secret number for apple-river is"
    return text.encode(filler[0] + needle + filler[1] + question)


numbers = [str(number) for number in rng.integers(10_000, 99_999, 8)]
prompts = [prompt(number) for number in numbers]
state, _ = kvjax.prefill(model, novelty, prompts, context=256)
held = np.asarray(kvjax.metrics.present(state))  # [L, B, K, C]
lengths = [len(one) for one in prompts]

share = np.asarray([held[:, row].sum(-1).mean() / n for row, n in enumerate(lengths)])
print("a quarter stays:", bool((abs(share - 0.25) < 0.02).all()))
print("sinks stay:", bool(held[..., :4].all()))
other, _ = kvjax.prefill(model, novelty, prompts[::-1], context=256)
same = np.asarray(kvjax.metrics.present(other))[:, ::-1] == held
print("no row sees another:", bool(same.all()))

# %% [markdown]
# In a file of `kvjax/policies`, or of a package of yours, a method gets all laws by itself: `EXAMPLES` says
# with which budgets, and `pytest tests/test_conformance.py` runs them.
#
# ## Its curve
#
# How many of the numbers are still found, at four budgets. Budgets are traced: a method compiles once.

# %%
budgets = (0.5, 0.25, 0.125, 0.08)
others = ("snapkv(8)", "tova", "keydiff", "knorm", "random")
policies = {name: kvjax.policy(f"{name} + uniform(0.5) + sinks(4)") for name in others} | {"novelty": novelty}


def found(policy):
    run = kvjax.generate(model, policy, prompts, max_new_tokens=3)
    return np.mean([number in text.decode(row) for number, row in zip(numbers, run.tokens)])


curves = {}
for name, policy in policies.items():
    at = [dataclasses.replace(policy, budget=Uniform(budget)) for budget in budgets]
    curves[name] = [float(found(one)) for one in at]
    print(f"{name:12}", "  ".join(f"{100 * share:3.0f} %" for share in curves[name]))

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(6, 3.5), layout="constrained")
axes = figure.subplots()
styles = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), ((0, (1, 1)), "D"), ("-", "*")]
for size, (name, curve), (line, mark) in zip((14, 12, 10, 8, 6, 4), curves.items(), styles):
    axes.plot(budgets, curve, linestyle=line, marker=mark, markersize=size, fillstyle="none", label=name)
axes.set(xlabel="share of the tokens kept", ylabel="numbers found", xscale="log", ylim=(-0.05, 1.05))
axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets], minor=False)
axes.minorticks_off()
axes.legend(fontsize=8)
figure

# %% [markdown]
# One sentence is repeated here, so what looks for keys unlike the others finds the number; and the question
# is part of the prompts, so SnapKV and TOVA, which look at its attention, know what is asked.
# `python -m kvjax.eval run --policy "..." --task niah` measures more samples, the question unseen, at equal
# bytes, with intervals.

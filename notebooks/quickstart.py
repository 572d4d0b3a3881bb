# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # kvjax in five minutes
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/kvjax/kvjax/blob/main/notebooks/quickstart.ipynb)
#
# A small trained model ships with the package; everything below runs on a CPU, without an account.

# %%
# On Colab this installs kvjax; anywhere else it does nothing. Colab's jax is built for its GPU and TPU
# runtimes, so the version that is there is asked for by name: pip leaves it alone, or says why it cannot.
import sys

if "google.colab" in sys.modules:
    import subprocess
    from importlib.metadata import version

    package = "kvjax @ git+https://github.com/kvjax/kvjax"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", package, f"jax=={version('jax')}"]
    subprocess.run(pip, check=True)

# %%
import kvjax

model = kvjax.load()
text = model.text

# %% [markdown]
# One needle in a page of prose, and the question at the end.

# %%
filler = "The road went on between the trees, and the evening was quiet and cold. " * 40
needle = "The secret number for apple-river is 48213."
question = " What is the secret number for apple-river? The secret number for apple-river is"
prompt = text.encode(filler + needle + " " + filler + question)
print(len(prompt), "tokens")

# %% [markdown]
# The same question under several policies: what they answer, and what the cache holds. `live` bytes hold
# tokens; `allocated` bytes are what the device gave for them, with space for the tokens to come.

# %%
rows = []
for spec in (
    "full",
    "window(256) + sinks(4)",
    "snapkv + uniform(0.25)",
    "snapkv + ada(0.25)",
    "quest",
    "int8",
):
    run = kvjax.generate(model, kvjax.policy(spec), [prompt], max_new_tokens=4)
    size = kvjax.nbytes(run.state).total
    rows.append((spec, text.decode(run.tokens[0]), size["live"], size["allocated"]))
    print(f"{spec:24}  {rows[-1][1]!r:14}  live {size['live']:9,}  allocated {size['allocated']:9,} bytes")

# %% [markdown]
# The window has dropped the number. All others answer: Quest removes nothing, INT8 holds every token in a
# third of the bytes, and SnapKV kept a quarter of the tokens, these among them: the question is part of the
# prompt, and its attention says what it needs.
#
# A policy is a value: six places, each with a part that does nothing by default. The string form parses
# to the same value, and `repr` gives the string back.

# %%
from kvjax.budgets.ada import Ada
from kvjax.policies.snapkv import SnapKV

policy = kvjax.Policy(eviction=SnapKV(window=16), budget=Ada(256), sinks=4)
assert kvjax.policy(repr(policy)) == policy
print(policy)

# %% [markdown]
# Prefill once, continue several times: `fork` copies a compressed context. Under AdaKV the KV heads of a
# layer share its slots and hold different numbers of tokens; here are those of the first layer, in each copy.

# %%
state, logits = kvjax.prefill(model, policy, [prompt], context=2048)
three = kvjax.fork(state, row=0, n=3)
[layer.pages.length[:, :, 0].tolist() for layer in three.layers if layer.pages is not None][0]

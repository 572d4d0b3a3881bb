# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # kvjax in five minutes
# A small trained model ships with the package; everything below runs on a CPU without a network.

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
# The same question under several policies: what they answer, and what the cache holds.

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
    run = kvjax.generate(model, kvjax.policy(spec), [prompt], max_new_tokens=7)
    size = kvjax.nbytes(run.state).total
    rows.append((spec, text.decode(run.tokens[0]), size["live"], size["allocated"]))
    print(f"{spec:24}  {rows[-1][1]!r:14}  live {size['live']:9,}  allocated {size['allocated']:9,} bytes")

# %% [markdown]
# A policy is a value: six places, each with a part that does nothing by default. The string form parses
# to the same value, and `repr` gives the string back.

# %%
from kvjax.budgets.ada import Ada
from kvjax.policies.snapkv import SnapKV

policy = kvjax.Policy(eviction=SnapKV(window=16), budget=Ada(256), sinks=4)
print(policy)
assert kvjax.policy(repr(policy)) == policy

# %% [markdown]
# Prefill once, continue several times: `fork` copies a compressed context.

# %%
state, logits = kvjax.prefill(model, policy, [prompt], context=2048)
three = kvjax.fork(state, row=0, n=3)
print([layer.pages.length[:, :, 0].tolist() for layer in three.layers if layer.pages is not None][0])

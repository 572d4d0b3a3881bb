# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: NONE
# ---

# %% [markdown]
# # kvjax in five minutes
#
# A small trained model ships with the package; everything below runs on a CPU, without an account.

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

print("\n".join((*doctor.software(), *doctor.devices())))

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
# Prefill once, continue several times: `fork` copies a compressed context. Under AdaKV the KV heads of a
# layer share its slots and hold different numbers of tokens; here are those of the first layer, in each copy.

# %%
policy = kvjax.policy("snapkv(16) + ada(256) + sinks(4)")
state, logits = kvjax.prefill(model, policy, [prompt], context=2048)
three = kvjax.fork(state, row=0, n=3)
[layer.pages.length[:, :, 0].tolist() for layer in three.layers if layer.pages is not None][0]

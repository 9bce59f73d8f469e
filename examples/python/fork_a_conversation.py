"""Fork a conversation: read a beginning once, and continue it in several ways.

    python fork_a_conversation.py [--model FOLDER] [--tokens 40]

A hybrid model remembers a text in recurrent states and in a KV cache. weft.State holds both, so a fork costs microseconds where reading
the beginning again would cost a whole prompt.
"""

# %% A model and a state with room for four sequences.
import argparse
import os
import tempfile
import time

import weft

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of a model; default: the bundled one")
parser.add_argument("--tokens", type=int, default=40, help="tokens to write in each branch")
options = parser.parse_args()

model = weft.Model(options.model)
state = weft.State(model, sequences=4, capacity=4096, rollback=8)
print(model.summary)
print("memory:", {name: weft.plan(model)[name] for name in ("weights", "recurrent_state", "kv_cache")})

# %% Read the beginning into sequence 0, once.
BEGINNING = "The ship had been at sea for forty days when the captain called us together. " * 8
start = time.perf_counter()
model.generate(BEGINNING, state=state, max_tokens=0)
print(f"read {len(state.tokens())} tokens in {1e3 * (time.perf_counter() - start):.0f} ms")

# %% Three branches with the same past. Each continues with words of its own.
turns = ("“We turn back,”", "“There is land,”", "Nobody spoke.")
for sequence, turn in enumerate(turns, start=1):
    start = time.perf_counter()
    state.fork(0, sequence)
    forked = 1e6 * (time.perf_counter() - start)
    text = model.generate(" " + turn, state=state, sequence=sequence, max_tokens=options.tokens, seed=sequence)
    print(f"\n[{sequence}] forked in {forked:.0f} us, read {text.prompt_tokens} tokens, wrote {len(text.tokens)} ({text.stop})")
    print(f"    {turn}{text}")

# %% The past of sequence 0 is as it was. Take a few words back, and try others.
length = len(state.tokens())
words = "He said" + model.generate("He said", state=state, max_tokens=4, temperature=0)
state.rollback(len(state.tokens()) - length)
others = "The sea" + model.generate("The sea", state=state, max_tokens=4, temperature=0)
print(f"\nrolled back: {words}\ninstead:     {others}")

# %% A branch goes to a file, and continues in another process, or tomorrow.
with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "branch.state")
    state.save(file, sequence=2)
    tomorrow = weft.State(model)
    tomorrow.load(file)
    here = model.generate(state=state, sequence=2, max_tokens=8, temperature=0)
    same = model.generate(state=tomorrow, max_tokens=8, temperature=0) == here
    print(f"{os.path.getsize(file)} bytes in the file; the text continues {'in the same way' if same else 'DIFFERENTLY'}")

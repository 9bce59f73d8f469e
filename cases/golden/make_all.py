"""Regenerate every golden file: tables first, then the files that use them; stops at the first disagreement between sources."""
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    for old in (here / "data").glob("*.safetensors"):
        old.unlink()
    for script in ("make_tables.py", "make_delta.py", "make_parts.py", "make_kv.py", "make_attention.py"):
        subprocess.run([sys.executable, str(here / script)], check=True, cwd=here)
    total = sum(f.stat().st_size for f in (here / "data").iterdir())
    assert total <= 3_000_000, total
    print("%d bytes of data" % total)

"""A launcher as plain as can be: `launch.py COUNT -m MODULE …` starts that many processes, and ends as rank 0
does.
"""

import os
import subprocess
import sys

count, words = int(sys.argv[1]), sys.argv[2:]
world = {"WORLD_SIZE": str(count)}
processes = [
    subprocess.Popen([sys.executable, *words], env={**os.environ, **world, "RANK": str(rank)})
    for rank in range(count)
]
code = processes[0].wait()
for process in processes[1:]:
    if code:
        process.kill()
    code = process.wait() if code == 0 else code
sys.exit(code)

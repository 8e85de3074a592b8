import json, os, socket, subprocess, sys, time
path = sys.argv[1]
s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen()
while True:
    c, _ = s.accept()
    line = c.makefile().readline()
    if not line: continue
    q = json.loads(line)
    t = time.monotonic()
    with open(q["log"], "ab") as log:
        p = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.cli.main", *q["argv"]], stdout=log, stderr=log, cwd=q["cwd"])
        c.sendall(json.dumps({"pid": p.pid}).encode() + b"\n")
        rc = p.wait()
    c.sendall(json.dumps({"exit_code": rc, "signal": None, "seconds": time.monotonic() - t, "cpu_s": 0.0}).encode() + b"\n")

"""Attention in float64 with every score formed, from bf16 tensors: a plain reference to time the oracle against.

Reads request.json and query.bin, key.bin, value.bin (bf16 bits, little endian) in the folder that is its argument; writes
out.bin (float64) there and prints one JSON object: the seconds of every run.
"""

import json
import pathlib
import sys
import time

import torch


def load(folder, name, shape):
    raw = bytearray((folder / name).read_bytes())
    return torch.frombuffer(raw, dtype=torch.int16).view(torch.bfloat16).reshape(shape)


def attend(query, key, value, scale):
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    keys, values = key.to(torch.float64), value.to(torch.float64)
    queries = query.to(torch.float64).reshape(query.shape[0], kv_heads, group, query.shape[2])
    scores = torch.einsum("rkgd,tkd->rkgt", queries, keys) * scale
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("rkgt,tkv->rkgv", weights, values)
    return out.reshape(query.shape[0], query.shape[1], value.shape[2])


def main():
    folder = pathlib.Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(request["threads"])
    rows, heads, kv_heads = request["rows"], request["heads"], request["kv_heads"]
    tokens, qk_dim, v_dim = request["tokens"], request["qk_dim"], request["v_dim"]
    query = load(folder, "query.bin", (rows, heads, qk_dim))
    key = load(folder, "key.bin", (tokens, kv_heads, qk_dim))
    value = key[:, :, :v_dim] if request["latent"] else load(folder, "value.bin", (tokens, kv_heads, v_dim))
    seconds = []
    for _ in range(request["runs"]):
        start = time.perf_counter()
        out = attend(query, key, value, request["scale"])
        seconds.append(time.perf_counter() - start)
    (folder / "out.bin").write_bytes(out.contiguous().numpy().tobytes())
    print(json.dumps({"version": torch.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()

"""A line of speed.jsonl, as a benchmark on a device writes it."""


def make_line(name, device="gpu NVIDIA H200 x 1", gigabytes=0, **fields):
    machine = {"date": "2030-01-02", "device": device, "cores": 16, "load": 0.1, "jax": "0.11.0"}
    case = {
        "case": "vmapped",
        "compile_seconds": 1.25,
        "seconds": [0.004, 0.002],
        "gigabytes": gigabytes,
    }
    figures = {
        "TFLOP/s": 51.234,
        "products": 5981.2,
        "CPU ms, vmapped": 3.0,
        "seeds from which": None,
    }
    return {"machine": machine, "benchmark": name, "timings": [case], "figures": figures} | fields

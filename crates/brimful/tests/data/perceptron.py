"""Writes perceptron.pt, a TorchScript module of two linear layers with a tanh between them, as
`torch.jit.save` would: a zip archive of code, a pickled object, and the tensors' bytes.

python3 crates/brimful/tests/data/perceptron.py
"""

import struct
import zipfile
from pathlib import Path

CODE = """\
class Perceptron(Module):
  __parameters__ = ["weight1", "bias1", "weight2", "bias2", ]
  __buffers__ = []
  weight1 : Tensor
  bias1 : Tensor
  weight2 : Tensor
  bias2 : Tensor
  training : bool
  def forward(self: __torch__.Perceptron,
    x: Tensor) -> Tensor:
    weight1 = self.weight1
    bias1 = self.bias1
    hidden = torch.tanh(torch.linear(x, weight1, bias1))
    weight2 = self.weight2
    bias2 = self.bias2
    return torch.linear(hidden, weight2, bias2)
"""
SHAPES = {"weight1": (6, 4), "bias1": (6,), "weight2": (3, 6), "bias2": (3,)}
TRUE = b"\x88"


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def count(number):
    return b"K" + bytes([number])


def tuple_of(*parts):
    return b"(" + b"".join(parts) + b"t"


def elements(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def tensor(key, shape):
    storage = tuple_of(
        text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"), count(elements(shape))
    )
    strides = [elements(shape[place + 1 :]) for place in range(len(shape))]
    sizes = tuple_of(*map(count, shape))
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = tuple_of(
        storage + b"Q", count(0), sizes, tuple_of(*map(count, strides)), TRUE, hooks
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def pickled():
    state = b"".join(text(name) + tensor(str(i), SHAPES[name]) for i, name in enumerate(SHAPES))
    state += text("training") + TRUE
    return b"\x80\x02c__torch__\nPerceptron\n)\x81}(" + state + b"ub."


def main():
    with zipfile.ZipFile(Path(__file__).with_name("perceptron.pt"), "w") as archive:

        def put(name, contents):
            # A fixed date, so that equal contents give equal files.
            archive.writestr(zipfile.ZipInfo(f"perceptron/{name}"), contents)

        put("data.pkl", pickled())
        for key, shape in enumerate(SHAPES.values()):
            numbers = [((7 * i + 3 * key) % 11 - 5) / 10 for i in range(elements(shape))]
            put(f"data/{key}", struct.pack(f"<{len(numbers)}f", *numbers))
        put("code/__torch__.py", CODE)
        put("constants.pkl", b"\x80\x02).")
        put("version", "3\n")


if __name__ == "__main__":
    main()

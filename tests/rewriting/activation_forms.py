"""The activations in the forms that exporters write them in."""

from __future__ import annotations

# Each form in terms of x, with the numbers that are written in it as tensors of rank 0.
FORMS = {
    # torch.onnx, both exporters; Hugging Face's own GELU; tf2onnx
    "Gelu": [
        "d = Div (x, 1.41421356)  e = Erf (d)  f = Add (e, 1.0)  g = Mul (x, f)  y = Mul (g, 0.5)",
        "d = Div (x, 1.41421356)  e = Erf (d)  f = Add (e, 1.0)  g = Mul (0.5, f)  y = Mul (x, g)",
        "h = Mul (x, 0.5)  d = Mul (x, 0.70710678)  e = Erf (d)  f = Add (1.0, e)  y = Mul (h, f)",
        "d = Mul (0.70710678, x)  e = Erf (d)  f = Add (e, 1.0)  g = Mul (f, 0.5)  y = Mul (g, x)",
        # the function body that ONNX gives it
        """hc = CastLike (0.5, x)  oc = CastLike (1.0, x)  tc = CastLike (2.0, x)  r = Sqrt (tc)
           d = Div (x, r)  e = Erf (d)  f = Sum (oc, e)  m = Mul (hc, x)  y = Mul (m, f)""",
    ],
    "GeluTanh": [
        """c = Pow (x, 3.0)  m = Mul (0.044715, c)  s = Add (x, m)  i = Mul (0.79788456, s)
           t = Tanh (i)  o = Add (1.0, t)  h = Mul (0.5, x)  y = Mul (h, o)""",
        """q = Mul (x, x)  c = Mul (q, x)  m = Mul (c, 0.044715)  s = Add (m, x)
           i = Mul (s, 0.79788456)  t = Tanh (i)  o = Add (t, 1.0)  p = Mul (x, o)
           y = Mul (p, 0.5)""",
        """q = Pow (x, 2.0)  m = Mul (q, 0.044715)  s = Add (m, 1.0)  k = Mul (x, 0.79788456)
           i = Mul (k, s)  t = Tanh (i)  o = Add (t, 1.0)  h = Mul (x, 0.5)  y = Mul (h, o)""",
        # the function body that ONNX gives it
        """hc = CastLike (0.5, x)  oc = CastLike (1.0, x)  pc = CastLike (0.63661975, x)
           nc = CastLike (0.044715, x)  r = Sqrt (pc)  ec = CastLike (3.0, x)  c = Pow (x, ec)
           m = Mul (nc, c)  s = Sum (x, m)  i = Mul (r, s)  t = Tanh (i)  o = Sum (oc, t)
           h = Mul (hc, x)  y = Mul (h, o)""",
        # torchlib, whose numbers nothing has folded
        """c = Pow (x, 3.0)  m = Mul (0.044715, c)  s = Add (x, m)  p = Div (2.0, 3.14159265)
           pc = CastLike (p, x)  r = Sqrt (pc)  i = Mul (r, s)  t = Tanh (i)  o = Add (t, 1.0)
           g = Mul (x, o)  y = Mul (0.5, g)""",
    ],
    "QuickGelu": [
        "m = Mul (x, 1.702)  s = Sigmoid (m)  y = Mul (x, s)",
        "c = CastLike (1.702, x)  m = Mul (c, x)  s = Sigmoid (m)  y = Mul (x, s)",
    ],
    "Silu": ["s = Sigmoid (x)  y = Mul (x, s)", "s = Sigmoid (x)  y = Mul (s, x)"],
    "HardSwish": [
        "s = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x)  y = Mul (x, s)",
        "p = Add (x, 3.0)  c = Clip (p, 0.0, 6.0)  m = Mul (x, c)  y = Div (m, 6.0)",
        "p = Add (3.0, x)  c = Clip (p, 0.0, 6.0)  d = Div (c, 6.0)  y = Mul (d, x)",
        "y = HardSwish (x)",
        # tf2onnx; the fraction taken into the bounds
        "p = Add (x, 3.0)  r = Relu (p)  c = Min (r, 6.0)  m = Mul (x, c)  y = Mul (m, 0.16666667)",
        "p = Add (x, 3.0)  l = Max (p, 0.0)  c = Min (l, 6.0)  d = Div (c, 6.0)  y = Mul (d, x)",
        "d = Mul (x, 0.16666667)  p = Add (d, 0.5)  c = Clip (p, 0.0, 1.0)  y = Mul (c, x)",
    ],
    "HardSigmoid": [
        "y = HardSigmoid <alpha = 0.3> (x)",
        "p = Add (x, 3.0)  c = Clip (p, 0.0, 6.0)  y = Div (c, 6.0)",
        "m = Mul (x, 0.2)  p = Add (m, 0.5)  y = Clip (p, 0.0, 1.0)",  # Keras
        "m = Mul (x, 0.2)  p = Add (m, 0.5)  l = Max (p, 0.0)  y = Min (l, 1.0)",
        """ac = CastLike (0.3, x)  bc = CastLike (0.4, x)  zc = CastLike (0.0, x)
           oc = CastLike (1.0, x)  m = Mul (x, ac)  p = Add (m, bc)  l = Min (p, oc)
           y = Max (l, zc)""",
    ],
    "Relu": [
        "y = Relu (x)",
        "y = Max (x, 0.0)",
        "y = Max (0.0, x)",
        "z = CastLike (0.0, x)  y = Max (x, z)",
    ],
    "LeakyRelu": ["y = LeakyRelu <alpha = 0.3> (x)", "y = LeakyRelu (x)", "y = PRelu (x, 0.3)"],
    "Clip": [
        "y = Clip (x, 0.0, 6.0)",
        'y = Clip (x, "", 1.5)',
        "y = Clip (x, -0.5)",
        "y = Clip (x)",
        # Relu6 of torch.export and tf2onnx, clamp
        "r = Relu (x)  y = Min (r, 6.0)",
        "l = Max (x, 0.0)  y = Min (l, 6.0)",
        "r = Relu (x)  y = Clip (r, 0.0, 6.0)",
        "h = Min (2.0, x)  y = Max (h, -1.0)",
        "y = Min (x, 1.5)",
    ],
    "Sigmoid": ["y = Sigmoid (x)"],
    "Tanh": ["y = Tanh (x)"],
}

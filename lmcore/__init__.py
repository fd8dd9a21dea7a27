"""lmcore: build, train and measure a Transformer language model. The library behind the workbook."""

__version__ = "0.1.0"

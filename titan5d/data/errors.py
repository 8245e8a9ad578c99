"""The one error of the data room: something about the data, the tokenizer or their settings cannot work."""


class DataError(ValueError):
    """Names the file, line or setting, the numbers, and what would work."""

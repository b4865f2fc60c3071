"""Values in a federation file: read strictly, and written so that they are read back."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def base64_of(certificate: x509.Certificate) -> str:
    """A certificate as text."""
    return base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()


def certificate_in(text: Any) -> x509.Certificate:
    """The certificate that `base64_of` wrote."""
    found = x509.load_der_x509_certificate(base64.b64decode(text_in(text), validate=True))
    if not isinstance(found.public_key(), ec.EllipticCurvePublicKey):
        raise TypeError("a certificate of another kind of key")
    return found


def text_in(value: Any) -> str:
    """A text, refused if it is anything else."""
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value


def whole_in(value: Any) -> int:
    """A whole number from 1."""
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is not a whole number from 1")
    return value


def number_in(value: Any) -> Any:
    """A number, refused if it is anything else."""
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value


def plain_table(table: Any) -> dict[str, Any]:
    """A table of options without tables in it."""
    if type(table) is not dict or any(type(v) not in (str, int, float, bool) for v in table.values()):
        raise TypeError("the plan is not a table of options")
    return table


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """The lines of a table."""
    return [f"{name} = {toml_value(value)}" for name, value in table.items()]


def toml_value(value: Any) -> str:
    """JSON's texts and numbers are TOML's, but for one character."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")

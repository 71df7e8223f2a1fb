"""AWS's event stream, as InvokeEndpointWithResponseStream answers: framed messages with headers and checksums.

The format is `application/vnd.amazon.eventstream`: total length, headers' length and a CRC-32 of the two; headers
(each: name, type 7, text); payload; a CRC-32 of everything before. botocore reads it but cannot write it.
"""

from __future__ import annotations

import json
import struct
import zlib

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_TEXT = 7
_PRELUDE_BYTES = 12
_CRC_BYTES = 4


def payload_part(data: bytes) -> bytes:
    """One piece of the container's answer."""
    headers = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
    }
    return _message(headers, data)


def model_stream_error(code: str, message: str) -> bytes:
    """The answer broke off. Codes are SageMaker's: StreamBroken, ModelInvocationTimeExceeded."""
    headers = {
        ":message-type": "exception",
        ":exception-type": "ModelStreamError",
        ":content-type": "application/json",
    }
    return _message(headers, json.dumps({"Message": message, "ErrorCode": code}).encode())


def _message(headers: dict[str, str], payload: bytes) -> bytes:
    packed = b"".join(_header(name, value) for name, value in headers.items())
    total = _PRELUDE_BYTES + len(packed) + len(payload) + _CRC_BYTES
    prelude = struct.pack("!II", total, len(packed))
    prelude += struct.pack("!I", zlib.crc32(prelude))
    body = prelude + packed + payload
    return body + struct.pack("!I", zlib.crc32(body))


def _header(name: str, value: str) -> bytes:
    name_bytes, value_bytes = name.encode(), value.encode()
    return (
        struct.pack("!B", len(name_bytes))
        + name_bytes
        + struct.pack("!BH", _TEXT, len(value_bytes))
        + value_bytes
    )

"""A certificate authority for tests, made with openssl."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Identity(NamedTuple):
    """A key and the certificate of it."""

    certificate: Path
    key: Path


def sign_itself(folder: Path) -> Identity:
    """Return a certificate for localhost that is its own authority: `cert.pem` and `key.pem`.

    Without openssl the test that needs one is skipped.
    """
    identity = Identity(folder / "cert.pem", folder / "key.pem")
    _run("req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", identity.key, "-out", identity.certificate)  # fmt: skip
    return identity


class Authority:
    """Vouches for servers on this machine and for clients with a URI as their name.

    Without openssl the test that makes one is skipped.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.certificate, self._key = self._folder / "ca.crt", self._folder / "ca.key"
        _run("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}",
             "-keyout", self._key, "-out", self.certificate)  # fmt: skip

    def issue(self, name: str, uri: str = "") -> Identity:
        """Issue a certificate for localhost; another one, where that name has one."""
        identity = Identity(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names = "DNS:localhost,IP:127.0.0.1" + (f",URI:{uri}" if uri else "")
        extensions.write_text(f"subjectAltName={names}\n", encoding="utf-8")
        _run("req", *_KEY, "-subj", f"/CN={name}", "-keyout", identity.key, "-out", request)
        _run("x509", "-req", "-days", "2", "-in", request, "-CA", self.certificate,
             "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions,
             "-out", identity.certificate)  # fmt: skip
        return identity


def _run(*arguments: object) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not on this machine")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True)

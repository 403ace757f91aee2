"""Over TLS, with an authority of one's own; needs a server that was built with TLS, and openssl."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from stm_backends.driver import Key
from stm_backends.errors import Unavailable
from stm_backends.testing import open_at
from tests.support.servers import free_port

CERTIFY = (
    "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    " -keyout key.pem -out cert.pem"
)


@pytest.fixture
def certificate(tmp_path):
    """The path of a certificate for `localhost`, and that of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, to make a certificate")
    subprocess.run([openssl, *CERTIFY.split()], cwd=tmp_path, check=True, capture_output=True)
    return str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")


async def test_a_server_is_trusted_by_its_certificate_and_by_nothing_less(start, certificate):
    (certificate, key), port = certificate, free_port()
    try:
        start(
            *("--save", "", "--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", certificate, "--tls-key-file", key),
        )
    except RuntimeError as error:
        if "tls" not in str(error):
            raise
        pytest.skip("this redis-server was built without TLS")
    driver = await open_at(f"rediss://localhost:{port}?tls_ca_file={certificate}")
    assert await driver.append(Key("scope", "name"), b"a", birth="birth", ttl=None) == 1
    await driver.close()
    with pytest.raises(Unavailable, match="no connection"):
        await open_at(f"rediss://localhost:{port}")
    with pytest.raises(Unavailable, match="no connection"):
        await open_at(f"rediss://127.0.0.1:{port}?tls_ca_file={certificate}")
    unchecked = f"rediss://127.0.0.1:{port}?tls_ca_file={certificate}&tls_check_hostname=false"
    await (await open_at(unchecked)).close()

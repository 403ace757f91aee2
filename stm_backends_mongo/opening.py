"""`open_mongo`: the backend with typed options, for editors and type checkers."""

from __future__ import annotations

from typing import Any, Unpack

from stm_backends.backend import Backend, open_backend
from stm_backends.opening import BackendOptions
from stm_backends_mongo.settings import Durability


class MongoOptions(BackendOptions, total=False):
    """The options of `open_mongo`: those of every backend, and the settings in `MongoSettings`."""

    client: Any
    deadline_s: float
    max_entry_bytes: int
    database: str
    collection: str
    durability: Durability
    linearizable: bool
    max_record_bytes: int

    # Options of MongoDB itself, which are passed to PyMongo; `CLIENT_OPTIONS` names them, too.
    username: str
    password: str
    appName: str
    authMechanism: str
    authMechanismProperties: str | dict[str, Any]
    authSource: str
    compressors: str | list[str]
    connectTimeoutMS: int
    directConnection: bool
    heartbeatFrequencyMS: int
    journal: bool
    loadBalanced: bool
    localThresholdMS: int
    maxConnecting: int
    maxIdleTimeMS: int
    maxPoolSize: int
    minPoolSize: int
    readConcernLevel: str
    readPreference: str
    replicaSet: str
    retryReads: bool
    retryWrites: bool
    serverMonitoringMode: str
    serverSelectionTimeoutMS: int
    socketTimeoutMS: int
    srvMaxHosts: int
    srvServiceName: str
    ssl: bool
    tls: bool
    tlsAllowInvalidCertificates: bool
    tlsAllowInvalidHostnames: bool
    tlsCAFile: str
    tlsCertificateKeyFile: str
    tlsCertificateKeyFilePassword: str
    tlsCRLFile: str
    tlsDisableOCSPEndpointCheck: bool
    tlsInsecure: bool
    w: str | int
    waitQueueTimeoutMS: int
    zlibCompressionLevel: int


def open_mongo(url: str | None = None, **options: Unpack[MongoOptions]) -> Backend:
    """Return a backend on MongoDB, as `open_backend("mongo", url=url, ...)` does.

    `client` is one of PyMongo or Motor, which stays open. With one, settings of a connection are refused.
    """
    return open_backend("mongo", url=url, **options)

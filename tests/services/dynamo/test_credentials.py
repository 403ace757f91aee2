"""Credentials that are looked at: moto checks signatures and policies, which DynamoDB Local does not."""

from __future__ import annotations

import json

import boto3
import pytest
from moto.core import set_initial_no_auth_action_count

from stm_backends.driver import Key
from stm_backends.errors import Denied
from stm_backends_dynamo import DynamoDriver, DynamoSettings

KEY = Key("acme:u1:memory", "chat")

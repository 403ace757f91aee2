"""Drivers of datastores, and what authors of drivers build on."""

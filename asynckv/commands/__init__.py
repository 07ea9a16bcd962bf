"""What the ``asynckv`` command does, a module for each subcommand; built on the public names alone."""

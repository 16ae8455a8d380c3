# ----------------------------------------------------------------------------------------------------------
# The engine's own functions, taken out of its files. `release` is the folder that holds the engine's package.

@CALLS@


def release_folder() -> Path:
    """The folder that the command line names, else the one that the case was recorded with."""
    named = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    folder = named[0] if named else Path(DATA["release"])
    if not folder.is_dir() or not DATA["release"] and not named:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER, an unpacked release of {DATA['engine']}: there is no {folder}")
    return folder


def engine(inputs: dict) -> dict:
    """What the release gives for the inputs."""
    step = SimpleNamespace(
        inputs=inputs,
        dtypes={name: entry["dtype"] for name, entry in DATA["inputs"].items()},
        shapes={name: wanted["shape"] for name, wanted in WANTED.items()},
        configuration=CONFIGURATION,
        parameters=DATA["operation"],
        effective=DATA["effective"],
    )
    return @FUNCTION@(release_folder(), step)

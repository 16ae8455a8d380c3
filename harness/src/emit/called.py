# ----------------------------------------------------------------------------------------------------------
# The engine's own functions, taken out of its files. `release` is the folder that holds the engine's package.

@CALLS@


# What says that the release has no answer to this case here, neither right nor wrong.
REFUSALS = {
    "must be a power of 2": "Triton takes widths and numbers of ranks that are powers of two",
    "to ir type": "this Triton's interpreter knows no such type",
    "name 'triton' is not defined": f"{sys.executable} has no triton",
    "name 'torch' is not defined": f"{sys.executable} has no torch",
}


def release_folder() -> Path:
    """The folder that the command line names, else the one that the case was recorded with."""
    folder = command_line().parse_args().folder
    if not folder or not Path(folder).is_dir():
        command_line().error(f"FOLDER must be an unpacked release of {DATA['engine']}: there is no {folder or 'other'}")
    return Path(folder)


def words_of(error: BaseException | None) -> str:
    """What an error says, and what those before it do."""
    return "" if error is None else f"{error}\n" + words_of(error.__cause__ or error.__context__)


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
    release = release_folder()
    try:
        return @FUNCTION@(release, step)
    except FileNotFoundError as error:
        place = f"FOLDER must hold a release of {DATA['engine']}, or one that is laid out like it"
        raise NotImplementedError(f"there is no {error.filename}: {place}") from error
    except Exception as error:
        said = words_of(error)
        for sign, meaning in REFUSALS.items():
            if sign in said:
                raise NotImplementedError(meaning) from error
        raise

//! How a closed vocabulary is printed and read: by the `name()` of its values, listed in `ALL`.

/// Implements `Display` and `FromStr` for an enum with `ALL` and `name()`; `$what` is the vocabulary in words.
macro_rules! named {
    ($kind:ty, $what:literal) => {
        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.into_iter().find(|value| value.name() == text).ok_or_else(|| {
                    let names: Vec<_> = Self::ALL.iter().map(|value| value.name()).collect();
                    format!("'{text}' is no {}; one of: {}", $what, names.join(", "))
                })
            }
        }
    };
}
pub(crate) use named;

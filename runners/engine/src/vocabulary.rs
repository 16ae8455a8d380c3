//! Closed lists of names.

/// An enum whose values have names: `ALL`, `name()`, `Display`, `FromStr` and serde from one table. `$what` is the list in words, for
/// whoever gives a name that is none.
#[macro_export]
macro_rules! vocabulary {
    ($(#[$doc:meta])* $type:ident ($what:literal) { $($(#[$value_doc:meta])* $value:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $type {
            $($(#[$value_doc])* #[serde(rename = $name)] $value,)+
        }

        impl $type {
            /// All of them, in a stable order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// Name as it stands in ids, in files and on the wire.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
                    format!("unknown {} {text:?}; known are {}", $what, Self::ALL.map(Self::name).join(", "))
                })
            }
        }
    };
}

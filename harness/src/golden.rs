//! Golden vectors: small problems with everything that the oracle says of them, for programs that load files.
//!
//! They are made by the deterministic route of the references: a fixed order of operations, own exponential and
//! logarithm, no fused multiply-add. The same bytes come out on every machine with IEEE arithmetic, and `verify` checks
//! that. A bound depends on the contract of whoever is judged, so the vectors hold the *moments* from which the bound
//! of any contract follows, not one bound.

mod attention;
mod layout;
mod merge;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use shardcheck_engine::Tensor;

use shardcheck_engine::archive::stored_dtype;

pub use attention::{AttentionEntry, moments_of};

/// Version of the folder's format.
pub const GOLDEN_SCHEMA_VERSION: u32 = 1;
/// Most bytes that the folder may hold.
pub const MAX_BYTES: u64 = 5 << 20;
const MANIFEST: &str = "manifest.json";
const SCHEMA: &str = "schema.json";

/// What is in the folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub schema_version: u32,
    /// Files by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Attention problems in `attention.safetensors`.
    pub attention: Vec<AttentionEntry>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size.
    pub bytes: u64,
    /// BLAKE3 hash, hexadecimal.
    pub blake3: String,
}

/// Why golden vectors can't be used.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not a manifest.
    #[error("{path} is not a golden manifest: {reason}; `shardcheck golden generate` makes one")]
    Manifest {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Written by another version.
    #[error("golden vectors have schema version {found}, this program reads {GOLDEN_SCHEMA_VERSION}")]
    Version {
        /// Version in the manifest.
        found: u32,
    },
}

/// A file that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// File.
    pub file: String,
    /// What is wrong with it.
    pub what: String,
}

/// All files of the folder but the manifest, made anew: name and content.
pub fn files() -> (BTreeMap<String, Vec<u8>>, Manifest) {
    let (attention, entries) = attention::file();
    let mut files = BTreeMap::new();
    files.insert("attention.safetensors".to_owned(), attention);
    files.insert("merge.safetensors".to_owned(), merge::file());
    files.insert("layout.json".to_owned(), layout::file());
    files.insert(SCHEMA.to_owned(), include_bytes!("golden/schema.json").to_vec());
    let listed = files
        .iter()
        .map(|(name, bytes)| {
            let entry =
                FileEntry { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() };
            (name.clone(), entry)
        })
        .collect();
    let manifest = Manifest { schema_version: GOLDEN_SCHEMA_VERSION, files: listed, attention: entries };
    (files, manifest)
}

/// Writes the vectors into `folder`.
///
/// # Errors
/// [`GoldenError::Io`].
pub fn generate(folder: &Path) -> Result<Manifest, GoldenError> {
    let (files, manifest) = files();
    write(folder, &files, &manifest)?;
    Ok(manifest)
}

/// Writes files that were made and their manifest into `folder`.
pub(crate) fn write(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    manifest: &Manifest,
) -> Result<(), GoldenError> {
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    for (name, bytes) in files {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(io(&path))?;
    }
    let path = folder.join(MANIFEST);
    std::fs::write(&path, manifest_text(manifest)).map_err(io(&path))
}

/// Lists a file in the folder's manifest as it lies there now.
pub(crate) fn relist(folder: &Path, file: &str) -> Result<(), GoldenError> {
    let mut manifest = stored_manifest(folder)?;
    let path = folder.join(file);
    let bytes = std::fs::read(&path).map_err(io(&path))?;
    let entry = FileEntry { bytes: bytes.len() as u64, blake3: blake3::hash(&bytes).to_hex().to_string() };
    manifest.files.insert(file.to_owned(), entry);
    let path = folder.join(MANIFEST);
    std::fs::write(&path, manifest_text(&manifest)).map_err(io(&path))
}

fn stored_manifest(folder: &Path) -> Result<Manifest, GoldenError> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read_to_string(&path).map_err(io(&path))?;
    let stored: Manifest = serde_json::from_str(&text)
        .map_err(|error| GoldenError::Manifest { path: path.clone(), reason: error.to_string() })?;
    if stored.schema_version != GOLDEN_SCHEMA_VERSION {
        return Err(GoldenError::Version { found: stored.schema_version });
    }
    Ok(stored)
}

/// Compares `folder` with its own manifest, then with vectors made anew. No difference: the folder is right.
///
/// # Errors
/// [`GoldenError`] when there is no manifest to compare with.
pub fn verify(folder: &Path) -> Result<Vec<Difference>, GoldenError> {
    stored_manifest(folder)?;
    let (fresh, manifest) = files();
    compare(folder, &fresh, &manifest)
}

/// As [`verify`], with vectors that were made before.
pub(crate) fn compare(
    folder: &Path,
    fresh: &BTreeMap<String, Vec<u8>>,
    manifest: &Manifest,
) -> Result<Vec<Difference>, GoldenError> {
    let stored = stored_manifest(folder)?;
    let mut differences = Vec::new();
    let mut note = |file: &str, what: String| differences.push(Difference { file: file.to_owned(), what });
    for (name, entry) in &stored.files {
        let path = folder.join(name);
        match std::fs::read(&path) {
            Err(error) => note(name, format!("can't be read: {error}")),
            Ok(bytes) if blake3::hash(&bytes).to_hex().as_str() != entry.blake3 => {
                let place = fresh.get(name).map_or_else(String::new, |fresh| first_difference(&bytes, fresh));
                note(name, format!("is not what the manifest lists: it was changed or cut off{place}"));
            }
            Ok(bytes) => match fresh.get(name) {
                None => note(name, "is not made by this program".to_owned()),
                Some(fresh) if *fresh != bytes => {
                    let place = first_difference(&bytes, fresh);
                    note(name, format!("is intact, but this program makes other bytes{place}"));
                }
                Some(_) => {}
            },
        }
    }
    for name in fresh.keys().filter(|name| !stored.files.contains_key(*name)) {
        note(name, "is not listed in the manifest".to_owned());
    }
    if differences.is_empty() && stored != *manifest {
        differences.push(Difference { file: MANIFEST.to_owned(), what: "lists other problems".to_owned() });
    }
    Ok(differences)
}

fn first_difference(found: &[u8], fresh: &[u8]) -> String {
    match found.iter().zip(fresh).position(|(a, b)| a != b) {
        Some(offset) => format!(" (first difference at byte {offset})"),
        None if found.len() != fresh.len() => format!(" ({} bytes instead of {})", found.len(), fresh.len()),
        None => String::new(),
    }
}

fn manifest_text(manifest: &Manifest) -> String {
    serde_json::to_string_pretty(manifest).expect("a manifest is plain data") + "\n"
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> GoldenError {
    let path = path.to_owned();
    move |source| GoldenError::Io { path, source }
}

/// Tensors as a safetensors file.
fn pack(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let view = TensorView::new(stored_dtype(tensor.dtype()), tensor.shape().to_vec(), tensor.bytes());
            (name.as_str(), view.expect("a tensor's bytes fill its shape"))
        })
        .collect();
    safetensors::serialize(views, None).expect("names are unique")
}

/// A float64 tensor.
fn f64_tensor(shape: &[usize], values: &[f64]) -> Tensor {
    let codes: Vec<u64> = values.iter().map(|value| value.to_bits()).collect();
    Tensor::from_codes(shardcheck_formats::Dtype::F64, shape, &codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_come_out_twice_and_stay_within_the_limit() {
        let (a, b) = (files(), files());
        assert_eq!(a, b);
        let total: usize = a.0.values().map(Vec::len).sum();
        assert!(total as u64 <= MAX_BYTES, "{total} bytes");
    }

    #[test]
    fn one_flipped_bit_is_found_and_the_file_named() {
        let folder = tempfile::tempdir().unwrap();
        generate(folder.path()).unwrap();
        assert_eq!(verify(folder.path()).unwrap(), []);
        let path = folder.path().join("attention.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let differences = verify(folder.path()).unwrap();
        assert_eq!(differences.len(), 1);
        assert_eq!(differences[0].file, "attention.safetensors");
        assert!(differences[0].what.contains(&format!("byte {middle}")), "{}", differences[0].what);
    }

    #[test]
    fn a_missing_file_a_foreign_version_and_a_damaged_manifest_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(verify(folder.path()), Err(GoldenError::Io { .. })));
        let manifest = generate(folder.path()).unwrap();
        std::fs::remove_file(folder.path().join("layout.json")).unwrap();
        assert_eq!(verify(folder.path()).unwrap()[0].file, "layout.json");
        let newer = Manifest { schema_version: 2, ..manifest };
        std::fs::write(folder.path().join(MANIFEST), manifest_text(&newer)).unwrap();
        assert!(matches!(verify(folder.path()), Err(GoldenError::Version { found: 2 })));
        std::fs::write(folder.path().join(MANIFEST), "{").unwrap();
        assert!(matches!(verify(folder.path()), Err(GoldenError::Manifest { .. })));
    }

    #[test]
    fn the_committed_vectors_are_what_this_machine_makes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
        assert_eq!(verify(&folder).unwrap(), []);
    }
}

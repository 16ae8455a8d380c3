//! The image of a call: one safetensors file whose metadata holds the header.

use std::collections::HashMap;

use safetensors::{SafeTensors, tensor::TensorView};
use shardcheck_engine::{Tensors, archive};

use super::{CheckError, Header, SCHEMA_VERSION};

/// Key of the metadata under which the header stands, as JSON text.
pub const METADATA_KEY: &str = "shardcheck";

/// The image of a call.
///
/// # Errors
/// [`CheckError::Image`] when safetensors refuses a tensor.
pub fn pack(header: &Header, tensors: &Tensors) -> Result<Vec<u8>, CheckError> {
    let refused = |error: safetensors::SafeTensorError| CheckError::Header(error.to_string());
    let text = serde_json::to_string(header).map_err(|error| CheckError::Header(error.to_string()))?;
    let contiguous: Vec<_> = tensors.iter().map(|(name, tensor)| (name, tensor.to_contiguous())).collect();
    let mut views = Vec::new();
    for (name, tensor) in &contiguous {
        let dtype = archive::stored_dtype(tensor.dtype());
        views
            .push((*name, TensorView::new(dtype, tensor.shape().to_vec(), tensor.bytes()).map_err(refused)?));
    }
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), text)]);
    safetensors::serialize(views, Some(metadata)).map_err(refused)
}

/// Header and tensors of an image.
///
/// # Errors
/// [`CheckError`] for a damaged image, a header that is missing, unknown or of another version.
pub fn unpack(image: &[u8]) -> Result<(Header, Tensors), CheckError> {
    let tensors = archive::unpack(image, &archive::StridedViews::new())?;
    let (_, metadata) =
        SafeTensors::read_metadata(image).map_err(|error| CheckError::Header(error.to_string()))?;
    let text = metadata
        .metadata()
        .as_ref()
        .and_then(|metadata| metadata.get(METADATA_KEY))
        .ok_or(CheckError::NoHeader { key: METADATA_KEY })?;
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| CheckError::Header(error.to_string()))?;
    // another version may have other fields: say so before they are refused one by one
    if let Some(found) = value.get("schema_version").and_then(serde_json::Value::as_u64)
        && found != u64::from(SCHEMA_VERSION)
    {
        return Err(CheckError::Version { found: u32::try_from(found).unwrap_or(u32::MAX) });
    }
    let header = serde_json::from_value(value).map_err(|error| CheckError::Header(error.to_string()))?;
    Ok((header, tensors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{ContractChoice, Preset, Subject};
    use shardcheck_engine::Tensor;
    use shardcheck_formats::Dtype;

    fn sample() -> (Header, Tensors) {
        let mut header = Header::new(Subject::Verify);
        header.softmax_scale = Some(0.1);
        header.contract = ContractChoice::Full(Box::new(Preset::F16.contract(Dtype::F16)));
        header.lse_layout = Some(crate::check::LseLayout::HeadsTokens);
        (header, Tensors::new().with("seq_lens", Tensor::from_i32(&[2], &[3, 4])))
    }

    #[test]
    fn a_call_comes_back_from_its_image_as_it_went() {
        let (header, tensors) = sample();
        let image = pack(&header, &tensors).unwrap();
        assert_eq!(unpack(&image).unwrap(), (header, tensors));
    }

    #[test]
    fn an_image_without_a_header_or_of_another_version_is_refused() {
        let (mut header, tensors) = sample();
        let (bare, _) = archive::pack(tensors.iter()).unwrap();
        assert!(matches!(unpack(&bare), Err(CheckError::NoHeader { .. })));
        header.schema_version = 2;
        let image = pack(&header, &tensors).unwrap();
        assert!(matches!(unpack(&image), Err(CheckError::Version { found: 2 })));
    }

    #[test]
    fn a_misspelt_field_is_refused_by_name() {
        let text = r#"{"schema_version":1,"check":"decode","softmax_scal":1.0}"#;
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), text.to_owned())]);
        let image = safetensors::serialize(Vec::<(&str, TensorView)>::new(), Some(metadata)).unwrap();
        assert!(unpack(&image).unwrap_err().to_string().contains("softmax_scal"));
    }

    #[test]
    fn a_cut_image_is_refused_at_every_length() {
        let (header, tensors) = sample();
        let image = pack(&header, &tensors).unwrap();
        assert!((0..image.len()).all(|length| unpack(&image[..length]).is_err()));
    }
}

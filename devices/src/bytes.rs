//! A block of bytes of fixed length, stored in a saved state as one hexadecimal word.

use std::ops::{Deref, DerefMut};

use anyhow::ensure;
use host::hex;
use serde::{Deserialize, Serialize};

/// The bytes of registers or of a buffer. Reading text of another length fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes<const N: usize>([u8; N]);

impl<const N: usize> Default for Bytes<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> Deref for Bytes<N> {
    type Target = [u8; N];

    fn deref(&self) -> &[u8; N] {
        &self.0
    }
}

impl<const N: usize> DerefMut for Bytes<N> {
    fn deref_mut(&mut self) -> &mut [u8; N] {
        &mut self.0
    }
}

impl<const N: usize> From<Bytes<N>> for String {
    fn from(bytes: Bytes<N>) -> Self {
        hex::encode(&bytes[..])
    }
}

impl<const N: usize> TryFrom<String> for Bytes<N> {
    type Error = anyhow::Error;

    fn try_from(text: String) -> anyhow::Result<Self> {
        let length = text.len();
        ensure!(length == 2 * N, "{length} hexadecimal digits instead of {}", 2 * N);
        let mut bytes = Self::default();
        bytes.copy_from_slice(&hex::decode(&text)?);
        Ok(bytes)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn serializes_as_hex_and_refuses_other_lengths() {
        let mut bytes = Bytes::<3>::default();
        bytes.copy_from_slice(&[0x00, 0x1f, 0xa0]);
        let text = serde_json::to_string(&bytes).unwrap();
        assert_eq!(text, r#""001fa0""#);
        assert_eq!(serde_json::from_str::<Bytes<3>>(&text).unwrap(), bytes);
        for bad in ["", "001fa", "001fa000", "001fag", "+01fa0", "0€f0"] {
            assert!(Bytes::<3>::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}

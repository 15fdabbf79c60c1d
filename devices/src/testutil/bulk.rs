//! USB mass storage, as its drivers send commands.

/// A command block wrapper for unit 0. `inward` is the direction of its data.
pub fn wrapper(tag: u32, cdb: &[u8], length: u32, inward: bool) -> [u8; 31] {
    let mut bytes = [0; 31];
    bytes[..4].copy_from_slice(b"USBC");
    bytes[4..8].copy_from_slice(&tag.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12] = u8::from(inward) << 7;
    bytes[14] = u8::try_from(cdb.len()).unwrap();
    bytes[15..15 + cdb.len()].copy_from_slice(cdb);
    bytes
}

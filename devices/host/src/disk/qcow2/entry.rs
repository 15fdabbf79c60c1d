//! Table entries of both levels (qcow2.rst, "Cluster mapping").

/// The cluster has exactly one reference, so it may be overwritten in place.
pub(super) const COPIED: u64 = 1 << 63;
/// The rest of the entry is a "Compressed Clusters Descriptor".
pub(super) const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros (version 3).
pub(super) const ZERO: u64 = 1;
/// Mask of the offset of the cluster or L2 table.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// "Compressed Clusters Descriptor": the offset in the file, and the length in bytes up to the end
/// of the last sector.
pub(super) fn packed_at(entry: u64, cluster_bits: u32) -> (u64, usize) {
    let shift = 62 - (cluster_bits - 8);
    let at = entry & ((1 << shift) - 1);
    let sectors = (entry & (COMPRESSED - 1)) >> shift;
    let length = (sectors + 1) * 512 - at % 512;
    (at, usize::try_from(length).unwrap_or_default())
}

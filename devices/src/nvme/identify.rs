//! Identify data of the controller and its namespace (NVMe 1.4, 5.15, and the parts of 2.0 that
//! Windows requests).

use super::command::Status;
use super::events::MAX_REQUESTS;
use super::features::{CRITICAL, WARNING};
use super::health::MAX_ERRORS;
use super::io::NAMESPACE;
use super::{Shared, VERSION, prp};

pub(super) const FIRMWARE: &[u8; 8] = b"1.0     ";
const MODEL: &str = "Transom NVMe disk";

/// Values of CNS (controller or namespace structure).
const OF_NAMESPACE: u8 = 0x00;
const OF_CONTROLLER: u8 = 0x01;
const ACTIVE: u8 = 0x02;
const DESCRIPTORS: u8 = 0x03;
const COMMAND_SET_NAMESPACE: u8 = 0x05;
const COMMAND_SET_CONTROLLER: u8 = 0x06;
const COMMAND_SET_ACTIVE: u8 = 0x07;
const INDEPENDENT: u8 = 0x08;

/// ONCS: Dataset Management, Write Zeroes, and the Save and Select fields of features.
const DATASET: u16 = 1 << 2;
const ZEROES_AND_SELECT: u16 = 1 << 3 | 1 << 4;
/// OACS: Doorbell Buffer Config.
const DOORBELL_BUFFER: u16 = 1 << 8;
/// OAES: namespace attribute notices.
const NAMESPACE_NOTICES: u32 = 1 << 8;

/// Bytes of a structure that is filled field by field, at the offsets of the specification.
pub(super) struct Page(pub(super) Vec<u8>);

impl Page {
    pub(super) fn new(size: usize) -> Self {
        Self(vec![0; size])
    }

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Padded with spaces.
    fn text(&mut self, at: usize, size: usize, text: &str) {
        self.0[at..at + size].fill(b' ');
        self.put(at, &text.as_bytes()[..text.len().min(size)]);
    }
}

/// The 4096 bytes that an Identify command returns.
pub(super) fn page(
    shared: &Shared,
    structure: u8,
    nsid: u32,
    command_set: u8,
) -> Result<Vec<u8>, Status> {
    let specific =
        matches!(structure, COMMAND_SET_NAMESPACE | COMMAND_SET_CONTROLLER | COMMAND_SET_ACTIVE);
    if specific && command_set != 0 {
        return Err(Status::INVALID_FIELD);
    }
    if matches!(structure, OF_NAMESPACE | DESCRIPTORS | COMMAND_SET_NAMESPACE | INDEPENDENT)
        && nsid != NAMESPACE
    {
        return Err(Status::INVALID_NAMESPACE);
    }
    let page = match structure {
        OF_NAMESPACE => namespace(shared),
        OF_CONTROLLER => controller(shared),
        ACTIVE | COMMAND_SET_ACTIVE if nsid >= u32::MAX - 1 => {
            return Err(Status::INVALID_NAMESPACE);
        }
        ACTIVE | COMMAND_SET_ACTIVE => {
            let mut page = Page::new(4096);
            if nsid < NAMESPACE {
                page.put(0, &NAMESPACE.to_le_bytes());
            }
            page
        }
        DESCRIPTORS => descriptors(shared),
        // This structure only describes protection information, which is not supported.
        COMMAND_SET_NAMESPACE => Page::new(4096),
        COMMAND_SET_CONTROLLER => command_set_limits(shared),
        INDEPENDENT => independent(shared),
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(page.0)
}

fn controller(shared: &Shared) -> Page {
    let mut page = Page::new(4096);
    page.put(0, &super::ID.vendor.to_le_bytes());
    page.put(2, &super::ID.subsystem.0.to_le_bytes());
    page.text(4, 20, &shared.serial);
    page.text(24, 40, MODEL);
    page.put(64, FIRMWARE);
    // Recommended arbitration burst of 2^6 commands, and maximum transfer size.
    page.put(72, &[6]);
    page.put(77, &[prp::MDTS]);
    page.put(80, &VERSION.to_le_bytes());
    page.put(92, &NAMESPACE_NOTICES.to_le_bytes());
    // An I/O controller.
    page.put(111, &[1]);
    let shadows = if shared.offers_shadows() { DOORBELL_BUFFER } else { 0 };
    page.put(256, &shadows.to_le_bytes());
    // Abort limit (4), event request limit, and one read-only firmware slot.
    let requests = u8::try_from(MAX_REQUESTS - 1).expect("a few");
    page.put(258, &[3, requests, 0b11]);
    // Log page attributes: commands supported and effects, extended data. Size of the error log.
    page.put(261, &[0b110, u8::try_from(MAX_ERRORS - 1).expect("a few")]);
    page.put(266, &WARNING.to_le_bytes());
    page.put(268, &CRITICAL.to_le_bytes());
    // Entries of exactly 2^6 and 2^4 bytes.
    page.put(512, &[0x66, 0x44]);
    page.put(516, &NAMESPACE.to_le_bytes());
    let dataset = if shared.discards() { DATASET } else { 0 };
    page.put(520, &(dataset | ZEROES_AND_SELECT).to_le_bytes());
    // A volatile write cache, and Flush accepts all namespaces.
    page.put(525, &[0b111]);
    let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", shared.uuid());
    page.put(768, name.as_bytes());
    // One power state: at most 25 watts, in hundredths of a watt.
    page.put(2048, &2500_u16.to_le_bytes());
    page
}

fn namespace(shared: &Shared) -> Page {
    let mut page = Page::new(4096);
    for at in [0, 8, 16] {
        page.put(at, &shared.blocks().to_le_bytes());
    }
    // NSFEAT: the preferred granularities below are valid.
    page.put(24, &[1 << 4]);
    // DLFEAT: Write Zeroes can deallocate.
    page.put(33, &[u8::from(shared.discards()) << 3]);
    let write = zeroes_based(shared.physical_block / shared.block);
    let discard = zeroes_based(shared.discard / shared.block);
    // Preferred write granularity and alignment, deallocate granularity and alignment, optimal
    // write size.
    for (at, blocks) in [(64, write), (66, write), (68, discard), (70, discard), (72, write)] {
        page.put(at, &blocks.to_le_bytes());
    }
    page.put(99, &[u8::from(shared.read_only)]);
    // The only LBA format: the logarithm of its block size.
    page.put(128, &(shared.block.trailing_zeros() << 16).to_le_bytes());
    page
}

fn zeroes_based(blocks: u32) -> u16 {
    u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX)
}

/// Only a UUID: EUI-64 and NGUID need a number that the IEEE sells.
fn descriptors(shared: &Shared) -> Page {
    let mut page = Page::new(4096);
    page.put(0, &[3, 16]);
    page.put(4, &shared.uuid().0);
    // The command set identifier of NVM is 0.
    page.put(20, &[4, 1]);
    page
}

/// Limits for commands without data, in pages of 4 KiB: Write Zeroes may have 65536 blocks. Dataset
/// Management has no further limits.
fn command_set_limits(shared: &Shared) -> Page {
    let mut page = Page::new(4096);
    let zeroes = (u64::from(shared.block) << 16 >> 12).ilog2();
    page.put(1, &[u8::try_from(zeroes).expect("a few dozen at most")]);
    page
}

fn independent(shared: &Shared) -> Page {
    let mut page = Page::new(4096);
    page.put(8, &[u8::from(shared.read_only)]);
    // The namespace is ready.
    page.put(14, &[1]);
    page
}

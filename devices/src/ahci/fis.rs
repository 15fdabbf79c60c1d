//! Frame information structures (Serial ATA 3.x, 10.5), and the bits of the status and error
//! registers (ACS-2, 6).

/// Status: busy, ready, device fault, "seek complete", data request, error.
pub(super) const BSY: u8 = 0x80;
pub(super) const DRDY: u8 = 0x40;
pub(super) const DF: u8 = 0x20;
pub(super) const DSC: u8 = 0x10;
pub(super) const DRQ: u8 = 0x08;
pub(super) const ERR: u8 = 0x01;
/// The status of a device that is ready.
pub(super) const READY: u8 = DRDY | DSC;

/// Error: uncorrectable data, no such block, command aborted.
pub(super) const UNC: u8 = 0x40;
pub(super) const IDNF: u8 = 0x10;
pub(super) const ABRT: u8 = 0x04;

/// Offsets in the FIS receive area (AHCI 1.3.1, 4.2.1).
const DMA_SETUP_AT: u64 = 0x00;
const PIO_SETUP_AT: u64 = 0x20;
const REGISTER_AT: u64 = 0x40;
const DEVICE_BITS_AT: u64 = 0x58;

/// Types.
const HOST_TO_DEVICE: u8 = 0x27;
const REGISTER: u8 = 0x34;
const DMA_SETUP: u8 = 0x41;
const PIO_SETUP: u8 = 0x5f;
const DEVICE_BITS: u8 = 0xa1;
/// Flags: interrupt, direction to the host.
const INTERRUPT: u8 = 1 << 6;
const TO_HOST: u8 = 1 << 5;

/// Bit of the device control register: software reset.
pub(super) const SRST: u8 = 1 << 2;

/// A Register FIS from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// The FIS is a command. Otherwise it writes the device control register.
    pub(super) is_command: bool,
    pub(super) code: u8,
    pub(super) features: u16,
    /// 48 bits.
    pub(super) lba: u64,
    pub(super) device: u8,
    pub(super) count: u16,
    pub(super) control: u8,
}

impl Command {
    /// `None` if it is another FIS.
    pub(super) fn read(fis: &[u8; 20]) -> Option<Self> {
        let [kind, flags, code, f0, l0, l1, l2, device, l3, l4, l5, f1, c0, c1, _, control, ..] =
            *fis;
        (kind == HOST_TO_DEVICE).then_some(Self {
            is_command: flags & 0x80 != 0,
            code,
            features: u16::from_le_bytes([f0, f1]),
            lba: u64::from_le_bytes([l0, l1, l2, l3, l4, l5, 0, 0]),
            device,
            count: u16::from_le_bytes([c0, c1]),
            control,
        })
    }

    pub(super) fn feature(&self) -> u8 {
        self.features.to_le_bytes()[0]
    }
}

/// The registers that a device returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u8,
    pub(super) error: u8,
    pub(super) lba: u64,
    pub(super) device: u8,
    pub(super) count: u16,
}

impl Reply {
    /// A successful command leaves its registers.
    pub(super) fn to(command: &Command) -> Self {
        let Command { lba, device, count, .. } = *command;
        Self { status: READY, error: 0, lba, device, count }
    }

    /// Bytes 2 to 13 of a Register FIS.
    fn registers(&self) -> [u8; 12] {
        let [l0, l1, l2, l3, l4, l5, ..] = self.lba.to_le_bytes();
        let [c0, c1] = self.count.to_le_bytes();
        [self.status, self.error, l0, l1, l2, self.device, l3, l4, l5, 0, c0, c1]
    }

    /// The signature, as PxSIG has it.
    pub(super) fn signature(&self) -> u32 {
        let [l0, l1, l2, ..] = self.lba.to_le_bytes();
        u32::from_le_bytes([self.count.to_le_bytes()[0], l0, l1, l2])
    }
}

/// A FIS from the device: its place in the receive area, and its content.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fis {
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

impl Fis {
    pub(super) fn register(reply: &Reply, interrupt: bool) -> Self {
        let flags = if interrupt { INTERRUPT } else { 0 };
        let mut bytes = vec![REGISTER, flags];
        bytes.extend(reply.registers());
        bytes.resize(20, 0);
        Self { at: REGISTER_AT, bytes }
    }

    /// The last block of a PIO transfer, with `reply.status` as its ending status.
    pub(super) fn pio_setup(reply: &Reply, length: u64, to_host: bool) -> Self {
        let flags = if to_host { INTERRUPT | TO_HOST } else { 0 };
        let during = Reply { status: DRDY | DSC | DRQ, ..*reply };
        let mut bytes = vec![PIO_SETUP, flags];
        bytes.extend(during.registers());
        let count = u16::try_from(length).unwrap_or(0xfffe).to_le_bytes();
        bytes.extend([0, reply.status, count[0], count[1], 0, 0]);
        Self { at: PIO_SETUP_AT, bytes }
    }

    pub(super) fn dma_setup(tag: u8, length: u32, to_host: bool) -> Self {
        let mut bytes = vec![DMA_SETUP, if to_host { TO_HOST } else { 0 }, 0, 0, tag];
        bytes.resize(20, 0);
        bytes.extend(length.to_le_bytes());
        bytes.resize(28, 0);
        Self { at: DMA_SETUP_AT, bytes }
    }

    pub(super) fn device_bits(status: u8, error: u8, slots: u32) -> Self {
        let mut bytes = vec![DEVICE_BITS, INTERRUPT, status & 0x77, error];
        bytes.extend(slots.to_le_bytes());
        Self { at: DEVICE_BITS_AT, bytes }
    }
}

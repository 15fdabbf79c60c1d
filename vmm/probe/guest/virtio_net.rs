//! virtio-net (VIRTIO 1.3, 5.1): one pair of queues, whole frames, no offloads.
use crate::config::Function;
use crate::cpu::Cpu;
use crate::io::read8;
use crate::memory::Room;
use crate::virtio::{Queue, Transport, WRITE};

/// A modern device, and one that old drivers know, too.
const IDS: [u32; 2] = [0x1041, 0x1000];
const MAC: u64 = 1 << 5;
/// Where that is in the configuration.
const ADDRESS: u64 = 0;
/// Bytes before each frame: without offloads they are zeros.
pub(crate) const HEADER: u64 = 12;
/// Bytes of a buffer.
pub(crate) const BUFFER: u64 = 4096;

/// A frame that has arrived.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    buffer: u16,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// A controller, with buffers for what arrives.
pub(crate) struct VirtioNet {
    arriving: Queue,
    leaving: Queue,
    buffers: u64,
    pub(crate) mac: [u8; 6],
    /// It interrupts where it is asked to.
    pub(crate) interrupts: bool,
}

impl VirtioNet {
    /// The first one on bus 0.
    pub(crate) fn find() -> Option<Function> {
        Transport::find(IDS)
    }

    /// Takes the controller over from whoever had it.
    pub(crate) fn open(
        function: Function,
        room: &mut Room,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        let transport = Transport::open(function, MAC, interrupts, cpu)?;
        let byte = |at| read8(transport.device + ADDRESS + at);
        // Any will do where the device has none of its own.
        let given = transport.features & MAC != 0;
        let mac = if given { [0, 1, 2, 3, 4, 5].map(byte) } else { [2, 0, 0, 0, 0, 2] };
        let mut arriving = transport.queue(0, room)?;
        let leaving = transport.queue(1, room)?;
        let buffers = room.take(BUFFER * u64::from(arriving.size))?;
        for buffer in 0..arriving.size {
            let address = buffers + BUFFER * u64::from(buffer);
            arriving.describe(buffer, address, BUFFER as u32, (WRITE, 0));
            arriving.put(buffer);
        }
        transport.run();
        arriving.ring();
        Some(Self { arriving, leaving, buffers, mac, interrupts: transport.interrupts })
    }

    /// How many frames can be on their way out.
    pub(crate) fn depth(&self) -> usize {
        self.leaving.size.into()
    }

    /// Sends the frame behind the header at an address, under a number that is free, once
    /// [`VirtioNet::ring`] tells.
    pub(crate) fn put(&mut self, tag: usize, address: u64, length: u64) {
        let (tag, length) = (tag as u16, (HEADER + length) as u32);
        self.leaving.describe(tag, address, length, (0, 0));
        self.leaving.put(tag);
    }

    pub(crate) fn ring(&mut self) {
        self.leaving.ring();
    }

    /// A number whose frame was sent.
    pub(crate) fn sent(&mut self) -> Option<usize> {
        self.leaving.done().map(|(tag, _)| tag as usize)
    }

    pub(crate) fn received(&mut self) -> Option<Arrival> {
        let (buffer, length) = self.arriving.done()?;
        let address = self.buffers + BUFFER * u64::from(buffer) + HEADER;
        let length = u64::from(length).saturating_sub(HEADER);
        Some(Arrival { buffer: buffer as u16, address, length })
    }

    /// Asks for an interrupt when a frame was sent, or else when one has arrived.
    pub(crate) fn listen(&self, sending: bool) {
        if sending { self.leaving.listen() } else { self.arriving.listen() }
    }

    /// Its buffer is free for another one.
    pub(crate) fn give_back(&mut self, arrival: Arrival) {
        self.arriving.put(arrival.buffer);
        self.arriving.ring();
    }
}

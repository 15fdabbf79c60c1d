//! virtio-net (VIRTIO 1.3, 5.1): one pair of queues, whole frames, no offloads.
use crate::config::Function;
use crate::cpu::Cpu;
use crate::io::read8;
use crate::memory::Room;
use crate::virtio::{Descriptor, Queue, Transport, WRITE};

/// Device IDs: modern, and transitional.
const IDS: [u32; 2] = [0x1041, 0x1000];
const MAC: u64 = 1 << 5;
/// The offset of the MAC address in the device configuration.
const ADDRESS: u64 = 0;
/// Bytes of the header before each frame. Without offloads, it is zeros.
pub(crate) const HEADER: u64 = 12;
pub(crate) const BUFFER: u64 = 4096;

#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    buffer: u16,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

pub(crate) struct VirtioNet {
    receive: Queue,
    transmit: Queue,
    buffers: u64,
    pub(crate) mac: [u8; 6],
    pub(crate) interrupts: bool,
}

impl VirtioNet {
    /// The first one on bus 0.
    pub(crate) fn find() -> Option<Function> {
        Transport::find(IDS)
    }

    /// Resets the controller and starts it, whatever its state.
    pub(crate) fn open(
        function: Function,
        room: &mut Room,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        let transport = Transport::open(function, MAC, interrupts, cpu)?;
        let byte = |at| read8(transport.device + ADDRESS + at);
        // Any address will do if the device has none.
        let has_mac = transport.features & MAC != 0;
        let mac = if has_mac { [0, 1, 2, 3, 4, 5].map(byte) } else { [2, 0, 0, 0, 0, 2] };
        let mut receive = transport.queue(0, room)?;
        let transmit = transport.queue(1, room)?;
        let buffers = room.take(BUFFER * u64::from(receive.size))?;
        for buffer in 0..receive.size {
            let address = buffers + BUFFER * u64::from(buffer);
            let length = BUFFER as u32;
            receive.describe(buffer, Descriptor { address, length, flags: WRITE, next: 0 });
            receive.put(buffer);
        }
        transport.run();
        receive.ring();
        Some(Self { receive, transmit, buffers, mac, interrupts: transport.interrupts })
    }

    /// Adds `by` to the addresses of the doorbells, after their BAR moved.
    pub(crate) fn moved(&mut self, by: u64) {
        self.receive.moved(by);
        self.transmit.moved(by);
    }

    /// The maximum number of frames in flight.
    pub(crate) fn depth(&self) -> usize {
        self.transmit.size.into()
    }

    /// Queues the frame behind the header at an address, under a free number. [`VirtioNet::ring`]
    /// notifies the device.
    pub(crate) fn put(&mut self, tag: usize, address: u64, length: u64) {
        let (tag, length) = (tag as u16, (HEADER + length) as u32);
        self.transmit.describe(tag, Descriptor { address, length, flags: 0, next: 0 });
        self.transmit.put(tag);
    }

    pub(crate) fn ring(&mut self) {
        self.transmit.ring();
    }

    /// The number of a frame that was sent.
    pub(crate) fn sent(&mut self) -> Option<usize> {
        self.transmit.done().map(|(tag, _)| tag as usize)
    }

    pub(crate) fn received(&mut self) -> Option<Arrival> {
        let (buffer, length) = self.receive.done()?;
        let address = self.buffers + BUFFER * u64::from(buffer) + HEADER;
        let length = u64::from(length).saturating_sub(HEADER);
        Some(Arrival { buffer: buffer as u16, address, length })
    }

    /// Requests an interrupt for the next frame that is sent, or else for the next one that is
    /// received.
    pub(crate) fn request_interrupt(&self, sending: bool) {
        let queue = if sending { &self.transmit } else { &self.receive };
        queue.request_interrupt();
    }

    pub(crate) fn give_back(&mut self, arrival: Arrival) {
        self.receive.put(arrival.buffer);
        self.receive.ring();
    }
}

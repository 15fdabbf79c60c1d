//! A 16550A serial port (vm-superio), as COM1 to COM4.
//!
//! Threats: a guest that floods the port uses only its own time, because the vCPU that sends a byte
//! also writes it. Input from the host is limited to the chip's 64-byte FIFO, and further input
//! waits on the host. If the host side is gone, output is lost, but the guest continues.

use std::io;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, SerialState};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::line::Line;
use host::stream::{self, InputThread, Stream};

/// `--device serial,port=2,to=file:/tmp/log`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of the COM port: 1 to 4.
    #[serde(default = "one")]
    pub port: u8,
    /// Connection to the host: `stdio`, `file:PATH`, `socket:PATH` or `none`.
    #[serde(default)]
    pub to: Stream,
}

fn one() -> u8 {
    1
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        // The standard addresses of PCs since 1981.
        let (base, gsi) = match self.port {
            1 => (0x3f8, 4),
            2 => (0x2f8, 3),
            3 => (0x3e8, 4),
            4 => (0x2e8, 3),
            other => anyhow::bail!("there is no serial port {other}: use 1, 2, 3 or 4"),
        };
        grants.claim(Kind::Port, base..base + 8)?;
        let line = Interrupt(grants.line(gsi)?);
        grants.acpi("PNP0501");
        let (out, input) = stream::open(&self.to, grants.goes_on())?;
        let output = Output(Arc::new(Mutex::new(out)));
        let uart = new_uart(&SerialState::default(), &line, &output)?;
        Ok(Box::new(Serial { uart: Arc::new(Mutex::new(uart)), line, output, input, reader: None }))
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Stream(&self.to)
    }

    fn detach_host_side(&mut self) {
        self.to = Stream::None;
    }
}

type Uart = vm_superio::Serial<Interrupt, NoEvents, Output>;

/// Interrupt enable register, and its bit for received data.
const IER: u8 = 1;
const ON_RECEIVED: u8 = 1;
/// Interrupt identification register (read only). Bits 3..0 are the cause.
const IIR: u8 = 2;
const IDENTITY: u8 = 0xf;
const NO_INTERRUPT: u8 = 1;
const RECEIVED: u8 = 4;
/// Line control register. Its bit `DIVISOR` replaces IER by the divisor.
const LCR: u8 = 3;
const DIVISOR: u8 = 0x80;
/// Line status register.
const LSR: u8 = 5;
const DATA_READY: u8 = 1;

/// Whether there is data and its interrupt is enabled. In the chip this interrupt is a level.
/// vm-superio clears it with the first byte that is read, so a guest that reads a few bytes per
/// interrupt would get no interrupt for the rest.
fn wants_reading(uart: &mut Uart) -> bool {
    uart.read(LCR) & DIVISOR == 0
        && uart.read(IER) & ON_RECEIVED != 0
        && uart.read(LSR) & DATA_READY != 0
}

fn new_uart(state: &SerialState, line: &Interrupt, output: &Output) -> anyhow::Result<Uart> {
    Uart::from_state(state, line.clone(), NoEvents, output.clone())
        .map_err(|error| anyhow::anyhow!("the state of the serial port is damaged: {error:?}"))
}

#[derive(Clone)]
struct Interrupt(Arc<Line>);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.pulse();
        Ok(())
    }
}

#[derive(Clone)]
struct Output(Arc<Mutex<Box<dyn io::Write + Send>>>);

impl io::Write for Output {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        // A closed host side must not stop the guest, which cannot detect it.
        self.0.lock().expect("no device panicked").write_all(buffer).ok();
        Ok(buffer.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().expect("no device panicked").flush().ok();
        Ok(())
    }
}

struct Serial {
    uart: Arc<Mutex<Uart>>,
    line: Interrupt,
    output: Output,
    input: Option<stream::Input>,
    reader: Option<InputThread>,
}

/// A copy of vm-superio's `SerialState`, because that crate does not support serde.
#[derive(Serialize, Deserialize)]
struct State {
    registers: [u8; 9],
    input: Vec<u8>,
}

impl Device for Serial {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        let (Ok(offset), [byte]) = (u8::try_from(offset), data) else { return Access::Ignored };
        let mut uart = self.uart.lock().expect("no device panicked");
        *byte = uart.read(offset);
        if offset == IIR && *byte & NO_INTERRUPT != 0 && wants_reading(&mut uart) {
            *byte = *byte & !IDENTITY | RECEIVED;
        }
        drop(uart);
        if offset == 0
            && let Some(reader) = &self.reader
        {
            reader.room();
        }
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        let (Ok(offset), [byte]) = (u8::try_from(offset), data) else { return Access::Ignored };
        let mut uart = self.uart.lock().expect("no device panicked");
        // This fails only if the line or the output fails, and neither ever does.
        uart.write(offset, *byte).ok();
        // Data arrived before the guest enabled the interrupt.
        if offset == IER && wants_reading(&mut uart) {
            self.line.0.pulse();
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        self.input = self.reader.take().map_or_else(|| self.input.take(), |it| Some(it.stop()));
        Saved::of(&State::from(self.uart.lock().expect("no device panicked").state()))
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let state: Option<State> = saved.take()?;
        let state = state.map_or_else(SerialState::default, SerialState::from);
        let uart = new_uart(&state, &self.line, &self.output)?;
        *self.uart.lock().expect("no device panicked") = uart;
        if let Some(input) = self.input.take() {
            let uart = self.uart.clone();
            let feed = move |bytes: &[u8]| {
                let mut uart = uart.lock().expect("no device panicked");
                let room = uart.fifo_capacity().min(bytes.len());
                if room > 0 {
                    uart.enqueue_raw_bytes(&bytes[..room]).ok();
                }
                room
            };
            self.reader = Some(InputThread::spawn("serial", input, feed)?);
        }
        Ok(())
    }
}

impl From<SerialState> for State {
    fn from(state: SerialState) -> Self {
        let registers = [
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ];
        Self { registers, input: state.in_buffer }
    }
}

impl From<State> for SerialState {
    fn from(State { registers, input }: State) -> Self {
        let [low, high, enable, identification, line, line_status, modem, modem_status, scratch] =
            registers;
        Self {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: enable,
            interrupt_identification: identification,
            line_control: line,
            line_status,
            modem_control: modem,
            modem_status,
            scratch,
            in_buffer: input,
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;

    fn bench(to: Stream) -> Bench {
        let mut bench = Bench::new(4096);
        bench.board.add("serial", |grants| Config { port: 1, to }.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        bench
    }

    #[test]
    fn guest_output_reaches_the_file_and_park_keeps_the_registers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bench = bench(Stream::File(file.path().to_owned()));
        for byte in b"hello" {
            bench.write(Kind::Port, 0x3f8, &[*byte]);
        }
        assert_eq!(std::fs::read(file.path()).unwrap(), b"hello");
        bench.write(Kind::Port, 0x3ff, &[0x5a]);
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(bench.read(Kind::Port, 0x3ff), [0x5a]);
        bench.board.reset().unwrap();
        assert_eq!(bench.read(Kind::Port, 0x3ff), [0]);
        assert_eq!(bench.read(Kind::Port, 0x3f8), [0xff, 0xff], "registers are one byte wide");
    }

    #[test]
    fn input_beyond_the_fifo_waits_for_the_guest() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let bench = bench(Stream::Socket(path.clone()));
        bench.write(Kind::Port, 0x3f9, &[1]);
        let sent: Vec<u8> = (0..200).collect();
        let mut client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        client.write_all(&sent).unwrap();
        let mut got = Vec::new();
        while got.len() < sent.len() {
            // Line status: data ready.
            if bench.read::<1>(Kind::Port, 0x3fd)[0] & 1 == 1 {
                got.extend(bench.read::<1>(Kind::Port, 0x3f8));
            }
        }
        assert_eq!(got, sent);
        assert!(bench.hypervisor.pins.edges(4) > 0);
    }

    #[test]
    fn pending_fifo_bytes_interrupt_once_enabled() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let bench = bench(Stream::Socket(path.clone()));
        let mut client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        client.write_all(b"abc").unwrap();
        while bench.read::<1>(Kind::Port, 0x3fd)[0] & DATA_READY == 0 {}
        assert_eq!(bench.hypervisor.pins.edges(4), 0, "interrupts are not enabled");
        bench.write(Kind::Port, 0x3f9, &[ON_RECEIVED]);
        assert!(bench.hypervisor.pins.edges(4) > 0);
        for byte in *b"abc" {
            let identity = bench.read::<1>(Kind::Port, 0x3fa)[0] & IDENTITY;
            assert_eq!(identity, RECEIVED, "before {}", char::from(byte));
            assert_eq!(bench.read(Kind::Port, 0x3f8), [byte]);
        }
        assert_eq!(bench.read::<1>(Kind::Port, 0x3fa)[0] & IDENTITY, NO_INTERRUPT);
    }
}

//! The debug console of Bochs and QEMU: one port, to which firmware writes its log.
//!
//! Firmware detects the console by reading 0xE9 (OvmfPkg, `PlatformDebugLibIoPort`).
//!
//! Threats: a guest that floods the port uses its own processor time, because the vCPU that sends a
//! byte also writes it, and the disk space of the user who configured the file. If the host side is
//! gone or full, output is lost, but the guest continues.

use std::io::Write;

use serde::{Deserialize, Serialize};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants, HostSide};
use host::stream::{self, Stream};

/// `--device debugcon,to=file:/tmp/firmware.log`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The port: 0x402 for OVMF and SeaBIOS, 0xe9 for Bochs.
    #[serde(default = "ovmf")]
    pub port: u16,
    /// Destination of the text: `stdio`, `file:PATH` or `none`.
    #[serde(default)]
    pub to: Stream,
}

fn ovmf() -> u16 {
    0x402
}

/// The value of every read, by which firmware detects the console.
const PRESENT: u8 = 0xe9;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let port = u64::from(self.port);
        grants.claim(Kind::Port, port..port + 1)?;
        let output = stream::output(&self.to, grants.goes_on())?;
        Ok(Box::new(Debugcon { output }))
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Stream(&self.to)
    }

    fn detach_host_side(&mut self) {
        self.to = Stream::None;
    }
}

struct Debugcon {
    output: stream::Output,
}

impl Device for Debugcon {
    fn read(&mut self, _: Region, _: u64, data: &mut [u8]) -> Access {
        let [byte] = data else { return Access::Ignored };
        *byte = PRESENT;
        Access::Done
    }

    fn write(&mut self, _: Region, _: u64, data: &[u8]) -> Access {
        let [byte] = data else { return Access::Ignored };
        // The guest cannot learn that the host's disk is full.
        self.output.write_all(&[*byte]).ok();
        Access::Done
    }

    fn park(&mut self) -> Saved {
        self.output.flush().ok();
        Saved::default()
    }

    fn run(&mut self, _: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;

    #[test]
    fn firmware_output_reaches_the_file_across_park_and_reset() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut bench = Bench::new(4096);
        let config = Config { port: 0x402, to: Stream::File(file.path().to_owned()) };
        bench.board.add("debugcon", |grants| config.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        assert_eq!(bench.read(Kind::Port, 0x402), [0xe9]);
        bench.write(Kind::Port, 0x402, b"a");
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        bench.write(Kind::Port, 0x402, b"b");
        bench.board.reset().unwrap();
        bench.write(Kind::Port, 0x402, b"c");
        bench.write(Kind::Port, 0x402, b"xx");
        assert_eq!(std::fs::read(file.path()).unwrap(), b"abc", "only single bytes are written");
        assert_eq!(bench.read(Kind::Port, 0x402), [0xff, 0xff]);
    }

    #[test]
    fn refuses_a_socket_and_accepts_the_last_port() {
        let mut bench = Bench::new(4096);
        let config = Config { port: 0x402, to: Stream::Socket("/nowhere/s".into()) };
        let error = bench.board.add("debugcon", |grants| config.build(grants)).unwrap_err();
        assert!(format!("{error:#}").contains("`socket:/nowhere/s`"), "{error:#}");
        let config = Config { port: 0xffff, to: Stream::None };
        bench.board.add("debugcon", |grants| config.build(grants)).unwrap();
        assert_eq!(bench.read(Kind::Port, 0xffff), [0xe9]);
    }
}

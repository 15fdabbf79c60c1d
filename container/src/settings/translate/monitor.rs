//! `QMP`, `MONITOR`, `-qmp`, `-monitor` and `-mon`: addresses for clients of QEMU's two control
//! protocols.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};

use super::options::Options;
use crate::settings::value::{Value, quote};

/// The protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// QEMU's Machine Protocol: JSON.
    Qmp,
    /// The human monitor: lines of text.
    Human,
}

/// The address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Place {
    /// Reads a character device in QEMU's words, such as `tcp:127.0.0.1:4444,server,nowait`.
    pub(super) fn read(options: &Options) -> anyhow::Result<Self> {
        let (kind, rest) = options.first.split_once(':').unwrap_or((&options.first, ""));
        let place = match (kind.to_lowercase().as_str(), options.get("path")) {
            ("tcp" | "telnet", _) => {
                let (host, port) = rest.rsplit_once(':').context("the port is missing")?;
                Self::tcp(host, port)?
            }
            ("unix", _) => Self::unix(rest)?,
            ("socket", Some(path)) => Self::unix(path)?,
            ("socket", None) => {
                let host = options.get("host").unwrap_or_default();
                Self::tcp(host, options.get("port").context("the port is missing")?)?
            }
            _ => bail!("give tcp:127.0.0.1:PORT,server or unix:PATH,server"),
        };
        ensure!(options.on("server"), "the pod connects to nobody: add server");
        Ok(place)
    }

    fn tcp(host: &str, port: &str) -> anyhow::Result<Self> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = match host {
            "" => Ipv4Addr::UNSPECIFIED.into(),
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            _ => host.parse::<IpAddr>().ok().context("give an IP address, as 127.0.0.1")?,
        };
        let port = port.parse().ok().filter(|port| *port > 0);
        Ok(Self::Tcp(SocketAddr::new(address, port.context("give a port from 1 to 65535")?)))
    }

    fn unix(path: &str) -> anyhow::Result<Self> {
        Ok(Self::Unix(PathBuf::read(path)?))
    }

    /// Whether other hosts, and the guest, may reach it.
    pub fn is_exposed(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }

    pub fn show(&self) -> String {
        match self {
            Self::Tcp(address) => format!("tcp:{address}"),
            Self::Unix(path) => format!("unix:{}", path.show()),
        }
    }

    /// The note on an exposed address.
    pub(super) fn note(&self) -> Option<String> {
        self.is_exposed().then(|| {
            format!(
                "{} can be reached by other hosts, without a password: it answers only questions \
                 (query-*, info); for all commands, give 127.0.0.1 or unix:PATH",
                self.show()
            )
        })
    }
}

/// The value of `QMP` or `MONITOR`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Monitor {
    /// `None` for words without a meaning here.
    pub place: Option<Place>,
    notes: Vec<String>,
}

impl Value for Monitor {
    const ACCEPTS: &'static str = "tcp:ADDRESS:PORT,server or unix:PATH,server";

    fn read(text: &str) -> anyhow::Result<Self> {
        let options = Options::read(&String::read(text)?);
        Ok(match Place::read(&options) {
            Ok(place) => Self { notes: place.note().into_iter().collect(), place: Some(place) },
            Err(error) => {
                let note = format!("{} has no effect: {error:#}", quote(&options.first));
                Self { place: None, notes: vec![note] }
            }
        })
    }
    fn show(&self) -> String {
        self.place.as_ref().map_or_else(|| "none".to_owned(), Place::show)
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn addresses_are_read_as_qemu_reads_them() {
        for (text, shown, exposed) in [
            ("tcp:0.0.0.0:7149,server,wait=off", "tcp:0.0.0.0:7149", true),
            ("tcp::4444,server=on,wait=off", "tcp:0.0.0.0:4444", true),
            ("tcp:10.0.0.7:4444,server", "tcp:10.0.0.7:4444", true),
            ("tcp:[::]:4444,server", "tcp:[::]:4444", true),
            ("tcp:[::1]:4444,server", "tcp:[::1]:4444", false),
            ("telnet:localhost:7100,server,nowait,nodelay", "tcp:127.0.0.1:7100", false),
            ("unix:/run/shm/monitor.sock,server,nowait", "unix:/run/shm/monitor.sock", false),
        ] {
            let read = Monitor::read(text).unwrap();
            assert_eq!((&*read.show(), read.notes().len()), (shown, usize::from(exposed)));
            assert_eq!(read.place.unwrap().is_exposed(), exposed, "{text}");
        }
    }

    #[test]
    fn an_address_that_cannot_be_served_is_noted() {
        for (text, reason) in [
            ("stdio", "give tcp:127.0.0.1:PORT,server"),
            ("chardev:x", "give tcp:127.0.0.1:PORT,server"),
            ("tcp:127.0.0.1:4444", "add server"),
            ("tcp:127.0.0.1:4444,server=off", "add server"),
            ("tcp:4444,server", "the port is missing"),
            ("tcp:host.example:4444,server", "give an IP address"),
            ("tcp:127.0.0.1:0,server", "from 1 to 65535"),
            ("tcp:127.0.0.1:70000,server", "from 1 to 65535"),
            ("unix:monitor.sock,server", "give an absolute path"),
        ] {
            let read = Monitor::read(text).unwrap();
            assert_eq!(read.show(), "none");
            let [note] = &read.notes()[..] else { panic!("{text}: {read:?}") };
            assert!(note.contains(" has no effect: ") && note.contains(reason), "{note}");
        }
        assert!(Monitor::read("unix:/a\u{7}b,server").is_err());
    }
}

//! `SMP`: sockets, cores and threads.

use anyhow::{Context, bail, ensure};

use super::options::Options;
use crate::settings::value::{Value, quote};

const TOO_MANY: &str = "give 1 to 1024 processors";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Number of processors, the product of the others.
    pub count: u16,
    pub sockets: u16,
    /// Cores per socket.
    pub cores: u16,
    /// Threads per core.
    pub threads: u16,
    /// Notes on keys that have no meaning here.
    pub notes: Vec<String>,
}

impl Value for Topology {
    const ACCEPTS: &'static str = "N,sockets=S,cores=C,threads=T";

    fn read(text: &str) -> anyhow::Result<Self> {
        let options = Options::read(text);
        let mut count = (!options.first.is_empty()).then(|| number(&options.first)).transpose()?;
        let (mut sockets, mut cores, mut threads) = (None, None, None);
        let (mut inner, mut notes) = (1_u16, Vec::new());
        for (key, value) in &options.rest {
            let value = number(value.as_deref().unwrap_or_default())?;
            match key.as_str() {
                "cpus" => count = Some(value),
                "sockets" => sockets = Some(value),
                "cores" => cores = Some(value),
                "threads" => threads = Some(value),
                "dies" | "clusters" | "modules" | "books" | "drawers" => {
                    inner = inner.checked_mul(value).context(TOO_MANY)?;
                }
                "maxcpus" => {
                    notes.push("maxcpus has no effect: processors cannot be hot-plugged".into());
                }
                _ => bail!("{} is unknown: give sockets, cores and threads", quote(key)),
            }
        }
        if inner > 1 {
            notes.push("the cores of all dies of a socket form one group".into());
        }
        let of = |part: Option<u16>| u32::from(part.unwrap_or(1));
        let said = of(sockets) * of(threads);
        let whole = count.map(u32::from);
        // Missing counts become cores, as users expect: Windows limits the number of sockets.
        let cores = match (cores, whole) {
            (Some(cores), _) => u32::from(cores) * u32::from(inner),
            (None, Some(count)) => count.checked_div(said).unwrap_or(0),
            (None, None) => u32::from(inner),
        };
        let product = said.checked_mul(cores).filter(|product| (1..=1024).contains(product));
        let product = product.context(TOO_MANY)?;
        ensure!(
            whole.is_none_or(|whole| whole == product),
            "sockets, cores and threads make {product} processors, which differs from the given \
             number: correct one of them"
        );
        let small = |number: u32| u16::try_from(number).context(TOO_MANY);
        Ok(Self {
            count: small(product)?,
            sockets: small(of(sockets))?,
            cores: small(cores)?,
            threads: small(of(threads))?,
            notes,
        })
    }
    fn show(&self) -> String {
        let Self { count, sockets, cores, threads, .. } = self;
        format!("{count},sockets={sockets},cores={cores},threads={threads}")
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

/// A whole number from 1 to 1024.
fn number(text: &str) -> anyhow::Result<u16> {
    let plain = text.bytes().all(|digit| digit.is_ascii_digit());
    let number = text.parse().ok().filter(|number| plain && (1..=1024).contains(number));
    number.context("give numbers from 1 to 1024, like 4,sockets=1,cores=2,threads=2")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn missing_numbers_default_to_cores() {
        for (text, shown) in [
            ("4", "4,sockets=1,cores=4,threads=1"),
            ("8,sockets=1,dies=1,cores=4,threads=2", "8,sockets=1,cores=4,threads=2"),
            ("8,sockets=2", "8,sockets=2,cores=4,threads=1"),
            ("cpus=4,dies=2,cores=2", "4,sockets=1,cores=4,threads=1"),
            ("sockets=2,cores=3", "6,sockets=2,cores=3,threads=1"),
        ] {
            assert_eq!(Topology::read(text).unwrap().show(), shown, "{text}");
        }
        assert!(!Topology::read("2,maxcpus=4").unwrap().notes.is_empty());
    }

    #[test]
    fn refuses_inconsistent_topologies() {
        for bad in [
            "0",
            "4,cores=3",
            "x",
            "4,cores",
            "3,sockets=2",
            "1024,sockets=1024,cores=9",
            "65536",
            "+4",
            "4,apples=4",
            "dies=1024,modules=1024",
        ] {
            assert!(Topology::read(bad).is_err(), "{bad}");
        }
    }
}

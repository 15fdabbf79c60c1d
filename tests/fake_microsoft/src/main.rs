//! `fake-microsoft ADDRESS FOLDER ISO [FAULT…]`: serves ISO as every image of Microsoft, until it
//! is killed. The certificate to trust is FOLDER/authority.pem.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use fake_microsoft::{FakeMicrosoft, Site};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, folder, iso, faults @ ..] = &words[..] else {
        bail!("usage: fake-microsoft ADDRESS FOLDER ISO [FAULT…]");
    };
    let faults = faults.iter().map(|fault| fault.parse()).collect::<Result<_, _>>()?;
    let site = Site::new(Path::new(iso), faults)?;
    let address = address.parse().context("ADDRESS is one like 127.0.0.1:8443")?;
    let server = FakeMicrosoft::start(address, Path::new(folder), site).await?;
    let mut out = std::io::stdout();
    writeln!(out, "HTTPS_PROXY={}", server.proxy())?;
    writeln!(out, "SSL_CERT_FILE={}", server.authority.display())?;
    std::future::pending().await
}

//! The rules of the pod's packets, as nft(8) reads them: one table of our own, made in one
//! transaction in place of what a killed predecessor left, and removed in one.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use super::choice::{Kept, OLD_GATEWAY, Subnet};
use crate::settings::value::Value as _;
use crate::settings::words::Mac;
use crate::status::{Failure, Status};

/// What the rules are about.
pub(super) struct Rules<'a> {
    pub(super) tap: &'a str,
    pub(super) mac: Mac,
    pub(super) subnet: Subnet,
    pub(super) kept: &'a Kept,
}

/// Makes the table new: there is none, or that of a predecessor.
const REPLACE: &str = "table inet transom\ndelete table inet transom\n";

impl Rules<'_> {
    /// What `nft` is told.
    pub(super) fn text(&self) -> String {
        let parts = [self.guard(), self.translation(), self.limits()];
        format!("{REPLACE}table inet transom {{\n{}}}\n", parts.concat())
    }

    /// Who is what it says it is, before anything else. Outside nobody is the guest or the gateway;
    /// the guest has one card, one address and no IPv6.
    fn guard(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let (tap, mac) = (self.tap, self.mac.show());
        format!(
            "chain guard {{
type filter hook prerouting priority raw; policy accept;
iifname != {{ \"{tap}\", \"lo\" }} ip saddr {guest} drop
iifname != {{ \"{tap}\", \"lo\" }} ip daddr {{ {gateway}, {OLD_GATEWAY} }} drop
iifname != \"{tap}\" accept
ether saddr != {mac} drop
meta nfproto != ipv4 drop
ip saddr 0.0.0.0 udp dport 67 accept
ip saddr != {guest} drop
ip daddr 127.0.0.0/8 drop
}}
"
        )
    }

    /// What arrives at the pod, from outside, from the guest or from within, goes to the guest.
    fn translation(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let to_guest = to_guest(guest, self.kept);
        format!(
            "chain arrive {{
type nat hook prerouting priority dstnat; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
fib daddr type local goto guest
}}
chain turn {{
type nat hook output priority -100; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
ip daddr 127.0.0.0/8 return
fib daddr type local goto guest
}}
chain guest {{
{to_guest}}}
chain leave {{
type nat hook postrouting priority srcnat; policy accept;
oifname != \"lo\" ip saddr {guest} masquerade
}}
"
        )
    }

    /// Packets that fit, nobody who was not sent by us, and of the pod itself only what a guest
    /// needs: addresses, names, and an echo.
    fn limits(&self) -> String {
        let (tap, gateway) = (self.tap, self.subnet.gateway);
        format!(
            "chain fit {{
type filter hook forward priority mangle; policy accept;
iifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
oifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
}}
chain through {{
type filter hook forward priority filter; policy accept;
oifname != \"{tap}\" accept
ct status dnat accept
ct state new drop
}}
chain inside {{
type filter hook input priority filter; policy accept;
iifname != \"{tap}\" accept
ct state established,related accept
udp dport 67 accept
ip daddr {gateway} udp dport 53 accept
ip daddr {gateway} tcp dport 53 accept
icmp type echo-request accept
reject
}}
"
        )
    }
}

/// Sends all ports to the guest but those that are kept.
fn to_guest(guest: Ipv4Addr, kept: &Kept) -> String {
    let mut text = String::new();
    for (protocol, ports) in [("tcp", &kept.tcp), ("udp", &kept.udp)] {
        let but = match list(ports) {
            None => format!("meta l4proto {protocol}"),
            Some(ports) => format!("{protocol} dport != {{ {ports} }}"),
        };
        writeln!(text, "meta nfproto ipv4 {but} dnat ip to {guest}").expect("a string takes all");
    }
    text
}

fn list(ports: &BTreeSet<u16>) -> Option<String> {
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    (!ports.is_empty()).then(|| ports.join(", "))
}

/// Takes the table away.
pub(super) fn remove() -> anyhow::Result<()> {
    apply(REPLACE)
}

/// Does what the text says, or nothing.
pub(super) fn apply(text: &str) -> anyhow::Result<()> {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = nft.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Status::Network,
            "there is no program `nft`: install nftables, or say NETWORK=user",
        ),
        _ => anyhow::Error::new(error).context("nft"),
    })?;
    let mut input = child.stdin.take().context("the input of nft")?;
    // What it says is better than that it does not listen.
    input.write_all(text.as_bytes()).ok();
    drop(input);
    let ended = child.wait_with_output().context("nft")?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.lines().next().unwrap_or("nothing").trim();
    if said.contains("Operation not permitted") {
        bail!("nftables: {said}: add --cap-add NET_ADMIN, or say NETWORK=user");
    }
    bail!("nftables refuses the rules: {said}: the host needs nft_nat, nft_masq and nft_fib")
}

//! Variables of the network.

use crate::settings::variable::{Variable, variables};

pub(super) const NETWORK: &[Variable] = variables! {
    /// How the guest reaches the network: `nat` (a tap of the pod, which needs NET_ADMIN and
    /// /dev/net/tun), `user` (connections of the pod's own) or `none`.
    done "NETWORK" = "Y" (network.kind): Network;
    /// The guest is a host of the network behind the pod's interface, with an address of the DHCP
    /// server there. It needs a macvlan network, or a card of Ethernet, NET_ADMIN, MKNOD and the
    /// device rule `c *:* rwm`.
    done "DHCP" = "N" (network.dhcp): Unsupported;
    /// The pod's interface to the network.
    done "DEV" or "VM_NET_DEV" = "" (network.uplink): Network;
    /// The guest's address.
    done "IP" or "VM_NET_IP" = "" (network.address): Network;
    /// The mask of its network.
    done "MASK" or "VM_NET_MASK" = "255.255.255.0" (network.mask): Address;
    /// The address of the guest's card; else one that is made once and kept on the volume.
    done "MAC" or "VM_NET_MAC" = "" (network.mac): Address;
    /// The name of the tap.
    done "TAP" or "VM_NET_TAP" = "qemu" (network.tap): Network;
    /// The name of the bridge.
    ignored "BRIDGE" or "VM_NET_BRIDGE" = "docker"
        => "the tap has the gateway's address itself, and there is no bridge: leave it out";
    /// The longest packet; else that of the pod's interface.
    done "MTU" or "VM_NET_MTU" = "" (network.mtu): Network;
    /// The model of the guest's card.
    translated "ADAPTER" = "virtio-net-pci" (network.adapter): Network;
    /// Ports that stay with the pod and do not go to the guest.
    done "HOST_PORTS" = "" (network.kept): Network;
    /// Ports that go to the guest in user mode, besides 3389; with `nat`, where all ports do, those
    /// that it also has on the pod's loopback, as `kubectl port-forward` wants it, and by IPv6: by
    /// TCP alone.
    done "USER_PORTS" = "" (network.forwarded): Network;
    /// The port of a health check.
    ignored "CHECK_PORT" = "80"
        => "health is asked at /healthz and /readyz of the web port: point probes there";
    /// Options of dnsmasq.
    ignored "DNSMASQ_OPTS" = ""
        => "DHCP and DNS are our own: set IP, MASK, MTU and HOST";
    /// What dnsmasq says.
    ignored "DNSMASQ_DEBUG" = "N" => "DHCP and DNS are our own: set DEBUG=Y";
    /// No dnsmasq.
    ignored "DNSMASQ_DISABLE" = "N"
        => "DHCP and DNS are our own and are always there with NETWORK=nat: leave it out";
    /// Which dnsmasq.
    ignored "DNSMASQ" = "" => "DHCP and DNS are our own: leave it out";
    /// Where a process id would stand.
    ignored "DNSMASQ_PID" = "" => "DHCP and DNS are our own: leave it out";
    /// A folder with configuration of dnsmasq, in old versions.
    ignored "DNSMASQ_CONF_DIR" = ""
        => "DHCP and DNS are our own: set IP, MASK, MTU and HOST";
    /// What dnsmasq says, in old versions.
    ignored "DEBUG_DNS" = "N" => "DHCP and DNS are our own: set DEBUG=Y";
    /// Which passt.
    ignored "PASST" = "" => "user mode needs no program besides: leave it out";
    /// Options of passt.
    ignored "PASST_OPTS" = ""
        => "user mode needs no program besides: name ports with USER_PORTS and HOST_PORTS";
    /// What passt says.
    ignored "PASST_DEBUG" = "N" => "user mode needs no program besides: set DEBUG=Y";
    /// Where a process id would stand.
    ignored "PASST_PID" = "" => "user mode needs no program besides: leave it out";
    /// Where a socket would be.
    ignored "PASST_SOCKET" = "" => "user mode needs no program besides: leave it out";
};

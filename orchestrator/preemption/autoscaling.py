"""AWS Auto Scaling is told that an instance may be terminated now (`CompleteLifecycleAction`). Our only call of AWS.

Without it a group with a lifecycle hook keeps the instance, and its price, until the hook's time is over. Needs
credentials of the instance's role; the SDK is loaded only then. Blocking.
"""

from __future__ import annotations

from orchestrator.errors import SourceError

REQUEST_SECONDS = 3.0
TRANSITION = "autoscaling:EC2_INSTANCE_TERMINATING"
PERMISSIONS = (
    "autoscaling:DescribeAutoScalingInstances, autoscaling:DescribeLifecycleHooks and "
    "autoscaling:CompleteLifecycleAction"
)


def complete(instance_id: str, region: str, endpoint_url: str | None = None) -> int:
    """Complete all terminating hooks of the instance's group; how many there were. Raises SourceError.

    `endpoint_url`: a rehearsal's service, to which no credentials of anybody's are shown.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(
        region_name=region,
        connect_timeout=REQUEST_SECONDS,
        read_timeout=REQUEST_SECONDS,
        retries={"total_max_attempts": 2},
        proxies={} if endpoint_url else None,
    )
    nobody = {"aws_access_key_id": "rehearsal", "aws_secret_access_key": "rehearsal"} if endpoint_url else {}
    try:
        client = boto3.session.Session(**nobody).client("autoscaling", endpoint_url=endpoint_url, config=config)
        instances = client.describe_auto_scaling_instances(InstanceIds=[instance_id])["AutoScalingInstances"]
        if not instances:
            return 0
        group = instances[0]["AutoScalingGroupName"]
        hooks = client.describe_lifecycle_hooks(AutoScalingGroupName=group)["LifecycleHooks"]
        names = [hook["LifecycleHookName"] for hook in hooks if hook["LifecycleTransition"] == TRANSITION]
        for name in names:
            client.complete_lifecycle_action(
                LifecycleHookName=name,
                AutoScalingGroupName=group,
                LifecycleActionResult="CONTINUE",
                InstanceId=instance_id,
            )
        return len(names)
    except (BotoCoreError, ClientError, KeyError) as error:
        raise SourceError(f"{error}; the instance's role needs {PERMISSIONS}") from error
